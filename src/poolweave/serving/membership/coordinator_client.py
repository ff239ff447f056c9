"""The embedded shell's other end: a registry that is a coordinator process somewhere."""

from __future__ import annotations

import threading
from typing import Any, TypeVar

from poolweave.errors import PeerLost, PoolweaveError
from poolweave.scheduler.configuration import Configuration
from poolweave.scheduler.membership import MembershipConfig
from poolweave.scheduler.membership_messages import Admitted, Heartbeat, Join, Refused
from poolweave.serving.control.client import RpcClient
from poolweave.serving.control.messages import Done
from poolweave.serving.membership.wire import (
    Announced,
    Answer,
    AskJoin,
    Beat,
    CoordinatorReply,
    Drain,
    Greet,
    Leave,
    Watch,
)

_SLACK_S = 2.0  # of a watch's answer
R = TypeVar("R")


class CoordinatorClient:
    """A Registry; see there for what it raises. Connects at the first call, and anew once the coordinator was lost."""

    def __init__(self, address: str, config: MembershipConfig) -> None:
        self._address = address
        self._call_s = config.suspect_s  # a member that waits longer for an answer is suspect anyway
        self._lock = threading.Lock()  # guards _client, _closed
        self._client: RpcClient | None = None
        self._closed = False

    def join(self, message: Join) -> Admitted | Refused:
        answer = self._call(AskJoin(message), Answer)
        said = answer.admitted or answer.refused
        if said is None:
            raise PoolweaveError(f"the coordinator neither admitted nor refused {message.name}")
        return said

    def heartbeat(self, message: Heartbeat) -> Refused | None:
        return self._call(Beat(message), Answer).refused

    def leave(self, name: str, epoch: int) -> None:
        self._call(Leave(name, epoch), Done)

    def drain(self, name: str) -> None:
        self._call(Drain(name), Done)

    def watch(self, seen: Configuration | None, timeout_s: float) -> Configuration | None:
        request = Watch(seen.coordinator, seen.version, timeout_s) if seen else Watch(0, -1, timeout_s)
        reply: Any = self._call(request, object, timeout_s + _SLACK_S)
        return reply.configuration if isinstance(reply, Announced) else None

    def close(self) -> None:
        with self._lock:
            self._closed = True
            client, self._client = self._client, None
        if client is not None:
            client.close()

    def _call(self, request: Any, expect: type[R], timeout_s: float | None = None) -> R:
        return self._connected().call(request, expect, timeout_s=self._call_s if timeout_s is None else timeout_s)

    def _connected(self) -> RpcClient:
        with self._lock:
            if self._closed:
                raise PeerLost("this registry was closed", peer="coordinator", part="control", reason="closed here")
            if self._client is not None and self._client.lost:
                self._client.close()
                self._client = None
            if self._client is None:
                client = RpcClient(self._address, peer="coordinator", replies=CoordinatorReply)
                client.greet(Greet(), Done, timeout_s=self._call_s)
                self._client = client
            return self._client
