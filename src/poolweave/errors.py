"""Every exception poolweave raises: what happened, the numbers, and the setting to change.

A class names its numbers in `fields`; they are attributes of the exception, None when not known.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar


class PoolweaveError(Exception):
    """Base of all errors of this package; `fields` become attributes."""

    fields: ClassVar[tuple[str, ...]] = ()

    def __init__(self, message: str, **numbers: Any) -> None:
        super().__init__(message)
        unknown = set(numbers) - set(self.fields)
        assert not unknown, f"{type(self).__name__} has no field {unknown}"
        for name in self.fields:
            setattr(self, name, numbers.get(name))

    def __reduce__(self) -> Any:
        return _rebuild, (type(self), str(self), {name: getattr(self, name) for name in self.fields})

    @classmethod
    def from_native(cls, message: str, numbers: Sequence[int]) -> PoolweaveError:
        """Build from the core's positional numbers, which follow the order of `fields`."""
        named = dict(zip(cls.fields, numbers, strict=False))
        if "handle" in named:
            named["handle"] %= 2**64  # the core's numbers are signed
        return cls(message, **named)

    def __getattr__(self, name: str) -> Any:  # for type checkers: fields are set in __init__
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")


def _rebuild(cls: type[PoolweaveError], message: str, numbers: dict[str, Any]) -> PoolweaveError:
    return cls(message, **numbers)


class ConfigError(PoolweaveError, ValueError):
    """A setting or argument is out of its range, misspelt, or impossible on this machine."""

    fields = ("setting", "value", "limit")

    @classmethod
    def from_native(cls, message: str, numbers: Sequence[int]) -> PoolweaveError:
        """The core names the setting in the message; its numbers are value and limit."""
        return cls(message, **dict(zip(("value", "limit"), numbers, strict=False)))


class OutOfBlocks(PoolweaveError):
    """The pool cannot give the blocks asked for, even after evicting all it may."""

    fields: ClassVar[tuple[str, ...]] = ("needed", "free", "evictable", "pinned")


class QuotaExceeded(OutOfBlocks):
    """A tenant's quota does not hold the blocks asked for; `limit` is in blocks, `setting` names the cap."""

    fields = ("needed", "free", "evictable", "pinned", "limit", "setting")


class AllocTimeout(OutOfBlocks, TimeoutError):
    """No blocks came free by the deadline of a blocking alloc."""


class OutOfPages(PoolweaveError):
    """The arena's byte budget has no page left; all three numbers are pages."""

    fields = ("needed", "free", "budget")


class UnknownBlock(PoolweaveError):
    """A handle that this pool never gave out."""

    fields = ("handle",)


class StaleHandle(PoolweaveError):
    """A handle whose block was freed (or whose instance restarted) since."""

    fields = ("handle", "generation", "current")


class NotResident(PoolweaveError):
    """The block lies in another tier: swap it in first."""

    fields = ("handle",)


class NotSealed(PoolweaveError):
    """Only sealed blocks may be indexed or sent: their producer has not finished."""

    fields = ("handle",)


class PrivateBlock(PoolweaveError):
    """The block was received as private: it is not indexed here and not offered on."""

    fields = ("handle",)


class InstanceClosed(PoolweaveError):
    """The pool or engine was closed before this call."""


class SystemCallFailed(PoolweaveError, OSError):
    """The operating system refused; `errno` says why."""

    fields = ("errno",)


class LayoutMismatch(PoolweaveError):
    """Two instances store KV in layouts that cannot be copied onto each other."""

    fields = ("ours", "theirs")


class TransferFailed(PoolweaveError):
    """A transfer ended without its bytes marked valid; the source keeps its blocks."""

    fields: ClassVar[tuple[str, ...]] = ("peer", "part", "reason")


class TransferTimeout(TransferFailed, TimeoutError):
    """A transfer or a receive did not finish by its deadline."""


class PeerLost(TransferFailed):
    """The peer died, or restarted under a new epoch, during the exchange."""


class StaleEpoch(PeerLost):
    """Something that an earlier life of the peer gave out: it has restarted since."""


class ProtocolError(TransferFailed):
    """A peer sent bytes that are not this protocol, or not this version of it."""

    fields = ("peer", "part", "reason", "nbytes", "limit")

    @classmethod
    def from_native(cls, message: str, numbers: Sequence[int]) -> PoolweaveError:
        """The core's numbers are nbytes and limit."""
        return cls(message, **dict(zip(("nbytes", "limit"), numbers, strict=False)))


class UnknownPeer(PoolweaveError):
    """No address is known for this instance: call connect() first."""

    fields = ("peer",)


class DuplicateTransfer(PoolweaveError):
    """This tag is already in use between the two instances."""

    fields = ("tag",)


class AddressInUse(PoolweaveError, OSError):
    """Another live owner holds this port or instance name."""

    fields = ("address", "setting")


class ModelNotFound(PoolweaveError):
    """No loadable model lies at this path."""

    fields = ("path",)


class EventsMalformed(PoolweaveError, ValueError):
    """A batch of KV events that makes no sense from byte `offset` on; nothing of it was applied."""

    fields = ("offset",)


class PlanInfeasible(PoolweaveError):
    """No division of the devices holds both pools; `part` says which one misses: kv, weights or request."""

    fields = ("part", "needed_bytes", "available_bytes")


class ModelUnsupported(PoolweaveError):
    """The model has a feature that this engine would compute wrongly; it is refused by name."""

    fields = ("model", "feature")


class WeightsMismatch(PoolweaveError):
    """A checkpoint cannot be read, or does not fit its config."""

    fields = ("path", "missing", "misshapen")


class NotFinite(PoolweaveError):
    """The model computed NaN or infinity for this request; the others are not touched."""

    fields = ("position",)


class NoInstance(PoolweaveError):
    """No instance of the needed role accepts work now."""

    fields = ("role", "known")


class Overloaded(PoolweaveError):
    """No room to queue this request now, or none came by its deadline. Nothing was kept: try again later."""

    fields = ("waiting", "limit")


class WorkerLost(PoolweaveError):
    """A worker process died; requests of the models it served ended with this. restart() brings it back."""

    fields = ("worker", "exit_code")


class RequestRefused(PoolweaveError, ValueError):
    """A request that can never run here: empty, too long, or with impossible parameters."""

    fields = ("needed", "limit")


class DeadlineExceeded(PoolweaveError, TimeoutError):
    """A peer that is alive did not answer in time."""

    fields = ("peer", "seconds")


class InstanceDied(PoolweaveError):
    """An instance's process ended without saying why."""

    fields = ("instance", "exit_code")
