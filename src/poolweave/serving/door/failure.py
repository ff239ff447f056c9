"""Errors as a client gets them: a status and OpenAI's error object. One table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from poolweave.errors import (
    DeadlineExceeded,
    DuplicateTransfer,
    InstanceClosed,
    NoInstance,
    OutOfBlocks,
    Overloaded,
    PoolweaveError,
    RequestRefused,
    TransferFailed,
    UnknownPeer,
    WorkerLost,
)
from poolweave.serving.door.gate import Reason, TurnedAway

CLIENT_GONE = 499  # of which only metrics and logs hear


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """`retry_after_s`: when the same request may be answered."""

    status: int
    message: str
    code: str
    param: str | None = None
    retry_after_s: int | None = None

    @property
    def body(self) -> bytes:
        return msgspec.json.encode(self.document)

    @property
    def document(self) -> dict[str, Any]:
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return {
            "error": {name: text and text.encode(errors="backslashreplace").decode() for name, text in error.items()}
        }

    @property
    def headers(self) -> dict[str, str]:
        headers = {} if self.retry_after_s is None else {"Retry-After": str(self.retry_after_s)}
        return headers | ({"WWW-Authenticate": "Bearer"} if self.status == 401 else {})


class Refusal(Exception):
    """A request that is refused with `failure`."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


_TURNED_AWAY: dict[Reason, tuple[int, str]] = {
    Reason.DRAINING: (503, "draining"),
    Reason.FULL: (429, "queue_full"),
    Reason.QUOTA: (429, "quota_exceeded"),
    Reason.KEY: (401, "invalid_api_key"),
}
_STATUS: tuple[tuple[type[PoolweaveError], int, str], ...] = (
    (RequestRefused, 400, "invalid_request"),
    (DeadlineExceeded, 504, "timeout"),
    (NoInstance, 503, "no_instance"),
    (OutOfBlocks, 503, "out_of_blocks"),
    (InstanceClosed, 503, "instance_lost"),
    (TransferFailed, 503, "instance_lost"),
    (UnknownPeer, 503, "instance_lost"),
    (DuplicateTransfer, 503, "instance_lost"),
    (WorkerLost, 503, "instance_lost"),
    (Overloaded, 503, "out_of_blocks"),
)


def failure_of(error: Exception, retry_after_s: int) -> Failure:
    """What a client is told of `error`; `retry_after_s` where it makes sense to come again."""
    if isinstance(error, Refusal):
        return error.failure
    if isinstance(error, TurnedAway):
        status, code = _TURNED_AWAY[error.reason]
        retry = None if status == 401 else retry_after_s
        return Failure(status=status, message=error.message, code=code, retry_after_s=retry)
    for kind, status, code in _STATUS:
        if isinstance(error, kind):
            retry = retry_after_s if status == 503 else None
            return Failure(status=status, message=str(error), code=code, retry_after_s=retry)
    return Failure(status=500, message="the server failed on this request; its log says why", code="internal_error")


def unsupported(param: str, value: Any, why: str = "is not supported here") -> Refusal:
    """The typed 400 for what this door cannot do."""
    message = f"{param}={str(value)[:100]} {why}"
    return Refusal(Failure(status=400, message=message, code="unsupported_parameter", param=param))
