"""The etcd shell: members are keys under leases, joined by transactions, followed by watches.

    /poolweave/DEPLOYMENT/members/NAME    a member, as JSON, under its lease
    /poolweave/DEPLOYMENT/drains/NAME     the epoch that is asked to end

A lease that etcd lets run out is a member's death; its epoch never comes back. etcd gives every lease its full time
again when it starts, so one that was down for longer than the TTL loses nobody.
"""

from __future__ import annotations

import base64
import math
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar
from urllib.parse import urlsplit

import msgspec
import requests
from etcd3gw.client import Etcd3Client
from etcd3gw.exceptions import Etcd3Exception, WatchTimedOut
from etcd3gw.lease import Lease

from poolweave.errors import ConfigError, PeerLost
from poolweave.scheduler.configuration import Configuration, Member
from poolweave.scheduler.membership import MembershipConfig
from poolweave.scheduler.membership_messages import Admitted, Heartbeat, Join, Refusal, Refused

_SLICE_S = 1.0  # of a watch, so that close() ends it
P = ParamSpec("P")
R = TypeVar("R")


def _reached(call: Callable[Concatenate[EtcdRegistry, P], R]) -> Callable[Concatenate[EtcdRegistry, P], R]:
    """What etcd's client raises, as PeerLost."""

    @wraps(call)
    def reached(self: EtcdRegistry, /, *arguments: P.args, **options: P.kwargs) -> R:
        try:
            return call(self, *arguments, **options)
        except (Etcd3Exception, requests.RequestException, OSError) as error:
            reason = getattr(error, "detail_text", None) or str(error) or type(error).__name__
            raise PeerLost(
                f"etcd at {self.url} cannot be used: {reason}", peer="etcd", part="control", reason=reason
            ) from error

    return reached


class EtcdRegistry:
    """A Registry; see there for what it raises. One thread at a time: each user opens its own."""

    def __init__(self, client: Etcd3Client, url: str, deployment: str, config: MembershipConfig) -> None:
        self.url = url
        self._client = client
        self._config = config
        self._prefix = f"/poolweave/{deployment}/"
        self._leases: dict[tuple[str, int], Lease] = {}
        self._closed = threading.Event()

    @classmethod
    def open(cls, url: str, config: MembershipConfig) -> EtcdRegistry:
        """The registry at etcd://HOST:PORT/DEPLOYMENT. Raises ConfigError."""
        parts = urlsplit(url)
        deployment = parts.path.strip("/") or "default"
        if not parts.hostname or "/" in deployment:
            raise ConfigError(
                f"registry={url!r} is no etcd address; write e.g. 'etcd://127.0.0.1:2379/my-deployment'",
                setting="registry",
                value=url,
            )
        client = Etcd3Client(parts.hostname, parts.port or 2379, timeout=config.suspect_s, api_path=None)
        return cls(client, url, deployment, config)

    @_reached
    def join(self, message: Join) -> Admitted | Refused:
        key = self._key("members", message.name)
        life = (message.name, message.epoch)
        if life not in self._leases:  # kept before it is used: the answer to the transaction may get lost
            self._leases[life] = self._client.lease(math.ceil(self._config.ttl_s))
        held = self._leases[life]
        member = Member(name=message.name, epoch=message.epoch, role=message.role, addresses=message.addresses)
        put = {"key": key, "value": _base64(msgspec.json.encode(member)), "lease": held.id}
        result: Any = self._client.transaction(
            {
                "compare": [{"key": key, "result": "EQUAL", "target": "CREATE", "create_revision": 0}],
                "success": [{"request_put": put}],
                "failure": [{"request_range": {"key": key}}],
            }
        )
        new = bool(result.get("succeeded", False))
        if not new and self._holder(result) != message.epoch:
            self._leases.pop(life).revoke()
            return Refused(
                name=message.name,
                epoch=message.epoch,
                reason=Refusal.NAME_TAKEN,
                retry_after_s=self._config.heartbeat_s,  # its lease may end at any time: etcd sees no connection end
            )
        configuration = self._configuration()
        return Admitted(name=message.name, epoch=message.epoch, new=new, configuration=configuration)

    @_reached
    def heartbeat(self, message: Heartbeat) -> Refused | None:
        lease = self._leases.get((message.name, message.epoch))
        if lease is None:
            return Refused(name=message.name, epoch=message.epoch, reason=Refusal.UNKNOWN)
        if lease.refresh() > 0:
            return None
        del self._leases[message.name, message.epoch]
        return Refused(name=message.name, epoch=message.epoch, reason=Refusal.STALE_EPOCH)

    @_reached
    def leave(self, name: str, epoch: int) -> None:
        lease = self._leases.pop((name, epoch), None)
        if lease is not None:
            lease.revoke()

    @_reached
    def drain(self, name: str) -> None:
        for member in self._configuration().members:
            if member.name == name:
                self._client.put(f"{self._prefix}drains/{name}", str(member.epoch))

    @_reached
    def watch(self, seen: Configuration | None, timeout_s: float) -> Configuration | None:
        until = time.monotonic() + timeout_s
        while True:
            now = self._configuration()
            if seen is None or now.members != seen.members or now.coordinator != seen.coordinator:
                return now
            if not self._changed(now.version + 1, until):
                return None

    def close(self) -> None:
        self._closed.set()

    def _changed(self, revision: int, until: float) -> bool:
        """Wait for a change from `revision` on."""
        while not self._closed.is_set():
            left = until - time.monotonic()
            if left <= 0:
                return False
            try:
                self._client.watch_prefix_once(self._prefix, min(left, _SLICE_S), start_revision=revision)
            except WatchTimedOut:
                continue
            return True
        return False

    def _configuration(self) -> Configuration:
        """The members now; its version is etcd's revision, which only grows."""
        end = self._prefix[:-1] + chr(ord(self._prefix[-1]) + 1)
        found: Any = self._client.post(
            self._client.get_url("/kv/range"), json={"key": _base64(self._prefix), "range_end": _base64(end)}
        )
        values = {base64.b64decode(kv["key"]).decode(): base64.b64decode(kv["value"]) for kv in found.get("kvs", [])}
        members = []
        for key, value in sorted(values.items()):
            kind, _, name = key[len(self._prefix) :].partition("/")
            if kind == "members":
                member = msgspec.json.decode(value, type=Member)
                draining = values.get(f"{self._prefix}drains/{name}") == str(member.epoch).encode()
                members.append(replace(member, draining=draining))
        header = found["header"]
        return Configuration(
            coordinator=int(header["cluster_id"]), version=int(header["revision"]), members=tuple(members)
        )

    def _holder(self, result: Any) -> int | None:
        """The epoch that has the name, in a transaction's answer."""
        kvs = result["responses"][0]["response_range"].get("kvs", [])
        return msgspec.json.decode(base64.b64decode(kvs[0]["value"]), type=Member).epoch if kvs else None

    def _key(self, kind: str, name: str) -> str:
        return _base64(f"{self._prefix}{kind}/{name}")


def _base64(text: str | bytes) -> str:
    return base64.b64encode(text.encode() if isinstance(text, str) else text).decode()
