"""Interned identities: a small int for each, so that hot paths carry no strings. Knows no tree."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from poolweave.errors import ConfigError
from poolweave.index.identity import Identity

_DIGEST_BYTES = 16
_FEW = 1024  # so many are kept without looking who needs them,
_MANY = 8192  # and at most so many above those that are needed
_MOST = 2**32 - 1  # the index counts in 32 bits


class Namespace(int):
    """A namespace's number, and a hold on it: while one exists, the number stands for its identity."""

    _hold: _Hold

    @classmethod
    def held(cls, number: int, hold: _Hold) -> Namespace:
        made = cls(number)
        made._hold = hold
        return made


class Holder(Protocol):
    """Who keeps something by namespace."""

    def holds(self, ns: int) -> bool:
        """It must not be given up."""

    def gone(self, namespaces: Sequence[int]) -> None:
        """These were."""


class Accounts(Protocol):
    """Where namespaces have blocks, on the accounts of tenants."""

    def set_tenant(self, ns: int, tenant: int) -> bool:
        """`ns` is on this account from now on; false while it has blocks on another."""

    def forget(self, namespaces: list[int]) -> list[int]:
        """Those of these that have no blocks, now without an account."""


class Namespaces:
    """From identity digests to namespaces, and from those to tenants. Thread-safe.

    Namespace 0 is that of callers who name none. Salts and tenants are kept as digests only. Once there are many, those
    that nobody holds and that have no blocks are given up: their identities get another number when they come again. A
    number is never given to a second identity.
    """

    def __init__(self, accounts: Accounts, *, keeps_accounts: bool = False) -> None:
        self._blocks = accounts
        self._keeps_accounts = keeps_accounts
        self._lock = threading.Lock()
        self._by_digest: dict[bytes, int] = {}
        self._known: dict[int, _Known] = {}
        self._last = 0
        self._look_at = _FEW  # known ones at which to look for those that nobody needs
        self._tenants: dict[bytes, _Tenant] = {}
        self._last_tenant = 0
        self._holders: list[Holder] = []

    def add_holder(self, holder: Holder) -> None:
        """Ask it, too, before a namespace is given up. It is called under a lock and must not call back."""
        self._holders.append(holder)

    def of_identity(self, identity: Identity) -> Namespace:
        ns = self.of_digest(identity.digest)
        if not self._known[ns].tenant:
            self._told(ns, identity.tenant_digest)
        return ns

    def of_digest(self, digest: bytes, tenant: bytes = b"") -> Namespace:
        """`tenant`: whose it is, as `Identity.tenant_digest`; b"" where that is not known. Raises ConfigError for
        anything but the 16 bytes of `Identity.digest`."""
        ns = self._of_digest(digest)
        if tenant and not self._known[ns].tenant:
            self._told(ns, tenant)
        return ns

    def tenant(self, ns: int) -> bytes:
        """The digest of whose it is, the first that was told; b"" where none was. Raises as `require`."""
        self.require(ns)
        known = self._known.get(ns)
        return b"" if known is None else known.tenant

    def _told(self, ns: Namespace, tenant: bytes) -> None:
        if len(tenant) != _DIGEST_BYTES:
            raise ConfigError(f"a tenant's digest has {_DIGEST_BYTES} bytes, got {len(tenant)}", value=len(tenant))
        with self._lock:
            known = self._known[ns]
            known.tenant = known.tenant or bytes(tenant)
            if self._keeps_accounts:
                self._assign(known, ns)

    def _of_digest(self, digest: bytes) -> Namespace:
        with self._lock:
            number = self._by_digest.get(digest)
            if number is None:
                number = self._add(digest)
            known = self._known[number]
            hold = known.hold()
            if hold is None:
                hold = _Hold()
                known.hold = weakref.ref(hold)
        return Namespace.held(number, hold)

    def digest(self, ns: int) -> bytes | None:
        """Of the identity; None for namespace 0. Raises as `require`."""
        self.require(ns)
        known = self._known.get(ns)
        return None if known is None else known.digest

    def require(self, ns: int) -> None:
        """Raises ConfigError for a namespace that was never given out, or was given up since."""
        if not isinstance(ns, int):
            raise ConfigError(f"ns is an int from namespace(identity), got {ns!r}", setting="ns", value=repr(ns))
        if ns in self._known or ns == 0:
            return
        if 0 < ns <= self._last:
            raise ConfigError(
                f"namespace {ns} was given up, since nobody held it and it had no blocks; keep the value that "
                "namespace(identity) gives, or ask for it again",
                setting="ns",
                value=int(ns),
            )
        raise ConfigError(
            f"namespace {ns} is not known here (0 to {self._last} are); get it from namespace(identity)",
            setting="ns",
            value=int(ns),
        )

    def __len__(self) -> int:
        """Those that are known now, without 0."""
        return len(self._known)

    def _add(self, digest: bytes) -> int:
        if len(digest) != _DIGEST_BYTES:
            raise ConfigError(f"an identity digest has {_DIGEST_BYTES} bytes, got {len(digest)}", value=len(digest))
        if len(self._known) >= self._look_at:
            self._give_up()
            self._look_at = len(self._known) + min(max(_FEW, len(self._known)), _MANY)
        if self._last == _MOST:
            raise ConfigError(
                f"an index gives out at most {_MOST} namespaces in its life; open it anew", setting="ns", limit=_MOST
            )
        self._last += 1
        self._by_digest[bytes(digest)] = self._last
        self._known[self._last] = _Known(bytes(digest))
        return self._last

    def _give_up(self) -> None:
        """Cost O(known), which adding so many has earned."""
        idle = [ns for ns, known in self._known.items() if known.hold() is None]
        idle = [ns for ns in idle if not any(holder.holds(ns) for holder in self._holders)]
        gone = self._blocks.forget(idle)
        for ns in gone:
            known = self._known.pop(ns)
            del self._by_digest[known.digest]
            if known.on_account:
                tenant = self._tenants[known.tenant]
                tenant.namespaces -= 1
                if not tenant.namespaces:
                    del self._tenants[known.tenant]
        for holder in self._holders:
            holder.gone(gone)

    def _assign(self, known: _Known, ns: int) -> None:
        if known.on_account:
            return
        tenant = self._tenants.get(known.tenant)
        number = self._last_tenant + 1 if tenant is None else tenant.number
        if not self._blocks.set_tenant(ns, number):
            return
        if tenant is None:
            self._last_tenant = number
            tenant = self._tenants[known.tenant] = _Tenant(number)
        tenant.namespaces += 1
        known.on_account = True


class _Hold:
    """Lives as long as somebody has a Namespace of its number."""

    __slots__ = ("__weakref__",)


def _nobody() -> _Hold | None:
    return None


@dataclass(slots=True)
class _Known:
    digest: bytes
    hold: Callable[[], _Hold | None] = _nobody
    tenant: bytes = b""  # the digest of whose it is, once that was told
    on_account: bool = False  # of that tenant


@dataclass(slots=True)
class _Tenant:
    number: int
    namespaces: int = 0
