"""Quotas: how much of a pool each tenant may take. Knows whose a namespace is, not what is in it."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field

from poolweave.errors import ConfigError
from poolweave.index import Identity
from poolweave.mempool._native import BlockTable
from poolweave.types import parse_bytes

NO_LIMIT = 2**64 - 1
NOBODY = 0  # the tenant of blocks that no quota counts
_MOST = 2**16 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Quota:
    """Caps on one tenant's blocks, in bytes or like "2GiB"; None is no cap. `total`: over both tiers."""

    hbm: int | str | None = None
    dram: int | str | None = None
    total: int | str | None = None

    def slots(self, block_bytes: int) -> tuple[int, int, int]:
        """Blocks of HBM, DRAM and both. Raises ConfigError for what is no size."""
        caps = (("hbm", self.hbm), ("dram", self.dram), ("total", self.total))
        hbm, dram, total = (
            NO_LIMIT if cap is None else parse_bytes(cap, f"quota.{name}") // block_bytes for name, cap in caps
        )
        return hbm, dram, total


@dataclass(frozen=True, slots=True, kw_only=True)
class Quotas:
    """Who may take how much: `named` by the salt of their identities, and `each` for every other tenant (None: any
    amount). A tenant is a salt; a namespace of which a peer told the digest only is a tenant of its own.
    """

    named: Mapping[bytes, Quota] = field(default_factory=dict, repr=False)
    each: Quota | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantStats:
    """What a tenant has, in blocks by tier; `limit` and `block_limit` are None where there is none."""

    used: tuple[int, int]  # HBM, DRAM
    historical: tuple[int, int]
    limit: tuple[int | None, int | None]
    blocks: int
    block_limit: int | None


class TenantBook:
    """From namespaces to the tenants that quotas count. Thread-safe."""

    def __init__(self, quotas: Quotas, table: BlockTable, block_bytes: int) -> None:
        """Raises ConfigError for quotas that are no sizes."""
        for quota in (*quotas.named.values(), *((quotas.each,) if quotas.each is not None else ())):
            quota.slots(block_bytes)
        self._quotas = quotas
        self._table = table
        self._block_bytes = block_bytes
        self._lock = threading.Lock()
        self._of_salt: dict[bytes, int] = {}
        self._of_ns: dict[int, int] = {}
        self._ns_of: dict[int, int] = {}  # one namespace of each tenant, to find its blocks in the index
        table.set_tenants(1)

    def enter(self, ns: int, identity: Identity) -> None:
        """Say whose `ns` is. Without effect when it was used before."""
        with self._lock:
            if ns in self._of_ns:
                return
            if identity.salt not in self._of_salt:
                quota = self._quotas.named.get(identity.salt, self._quotas.each)
                self._of_salt[identity.salt] = self._open(quota, ns)
            self._of_ns[ns] = self._of_salt[identity.salt]

    def tenant(self, ns: int) -> int:
        """Whose `ns` is."""
        tenant = self._of_ns.get(ns)
        if tenant is not None:
            return tenant
        with self._lock:
            if ns not in self._of_ns:
                self._of_ns[ns] = self._open(self._quotas.each, ns)
            return self._of_ns[ns]

    def namespace(self, tenant: int) -> int:
        return self._ns_of[tenant]

    def _open(self, quota: Quota | None, ns: int) -> int:
        if quota is None:
            return NOBODY
        tenant = len(self._ns_of) + 1
        if tenant > _MOST:
            raise ConfigError(f"a pool counts at most {_MOST} tenants", setting="quotas", value=tenant, limit=_MOST)
        self._table.set_tenants(tenant + 1)
        self._table.set_quota(tenant, *quota.slots(self._block_bytes))
        self._ns_of[tenant] = ns
        return tenant

    def stats(self) -> dict[int, TenantStats]:
        """By one namespace of each tenant."""
        with self._lock:
            return {ns: self._of(tenant) for tenant, ns in self._ns_of.items()}

    def _of(self, tenant: int) -> TenantStats:
        counts = self._table.tenant(tenant)
        limits = [None if limit == NO_LIMIT else limit for limit in (*counts.limit, counts.block_limit)]
        return TenantStats(
            used=(counts.used[0], counts.used[1]), historical=(counts.historical[0], counts.historical[1]),
            limit=(limits[0], limits[1]), blocks=counts.blocks, block_limit=limits[2],
        )  # fmt: skip
