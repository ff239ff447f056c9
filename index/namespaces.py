"""Interned identities: a small int for each, so that hot paths carry no strings. Knows no tree."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable

from poolweave.errors import ConfigError
from poolweave.index.identity import Identity

_DIGEST_BYTES = 16


class Namespaces:
    """From identity digests to namespaces, and from salts to tenants. Thread-safe.

    Namespace 0 is that of callers who name none. Salts are kept as digests only.
    """

    def __init__(self, assign_tenant: Callable[[int, int], bool] | None = None) -> None:
        """`assign_tenant(ns, tenant)` is told whose account a namespace is on; None when nobody keeps accounts."""
        self._assign_tenant = assign_tenant
        self._lock = threading.Lock()
        self._by_digest: dict[bytes, int] = {}
        self._tenants: dict[bytes, int] = {}
        self._assigned: set[int] = set()

    def of_identity(self, identity: Identity) -> int:
        ns = self.of_digest(identity.digest)
        if self._assign_tenant is not None and ns not in self._assigned:
            salt = hashlib.blake2b(identity.salt, digest_size=_DIGEST_BYTES, person=b"poolweave-tenant").digest()
            with self._lock:
                tenant = self._tenants.setdefault(salt, len(self._tenants) + 1)
                if self._assign_tenant(ns, tenant):
                    self._assigned.add(ns)
        return ns

    def require(self, ns: int) -> None:
        """Raises ConfigError for a namespace that was never given out: it may become another identity's."""
        if not 0 <= ns <= len(self._by_digest):
            raise ConfigError(
                f"namespace {ns} is not known here (0 to {len(self._by_digest)} are); get it from namespace(identity)",
                setting="ns",
                value=ns,
            )

    def of_digest(self, digest: bytes) -> int:
        """Raises ConfigError for anything but the 16 bytes of `Identity.digest`."""
        ns = self._by_digest.get(digest)
        if ns is not None:
            return ns
        if len(digest) != _DIGEST_BYTES:
            raise ConfigError(f"an identity digest has {_DIGEST_BYTES} bytes, got {len(digest)}", value=len(digest))
        with self._lock:
            return self._by_digest.setdefault(bytes(digest), len(self._by_digest) + 1)
