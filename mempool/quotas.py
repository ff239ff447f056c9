"""Quotas: how much of a pool each tenant may take. Knows whose a namespace is, not what is in it."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from poolweave.errors import ConfigError
from poolweave.index import tenant_digest
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
    """Who may take how much: `named` by the tenant of their identities, and `each` for every other one (None: any
    amount). An identity without a tenant is its salt's; a namespace of which nobody told whose it is, its own.
    Raises ConfigError for a tenant that is not bytes.
    """

    named: Mapping[bytes, Quota] = field(default_factory=dict, repr=False)
    each: Quota | None = None

    def __post_init__(self) -> None:
        for tenant in self.named:
            if not isinstance(tenant, bytes):
                raise ConfigError(
                    f"a tenant of quotas.named is bytes, got {type(tenant).__name__}; write e.g. b'team-a'",
                    setting="quotas.named",
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantStats:
    """What a tenant has, in blocks by tier; `limit` and `block_limit` are None where there is none."""

    used: tuple[int, int]  # HBM, DRAM
    historical: tuple[int, int]
    limit: tuple[int | None, int | None]
    blocks: int
    block_limit: int | None


class TenantBook:
    """From namespaces to the tenants that quotas count. Thread-safe. What it keeps ends with the namespaces."""

    def __init__(self, quotas: Quotas, table: BlockTable, block_bytes: int) -> None:
        """Raises ConfigError for quotas that are no sizes."""
        for quota in (*quotas.named.values(), *((quotas.each,) if quotas.each is not None else ())):
            quota.slots(block_bytes)
        self._named = {tenant_digest(name): quota for name, quota in quotas.named.items()}
        self._each = quotas.each
        self._table = table
        self._block_bytes = block_bytes
        self._lock = threading.Lock()
        self._of_digest: dict[bytes, _Account] = {}
        self._of_ns: dict[int, _Account | None] = {}  # None: no quota counts it
        self._of_tenant: dict[int, _Account] = {}
        self._free: list[int] = []  # numbers of tenants that are gone
        table.set_tenants(1)

    def enter(self, ns: int, digest: bytes) -> None:
        """Say whose `ns` is, by Identity.tenant_digest. Without effect when it was used before."""
        if ns in self._of_ns:
            return
        with self._lock:
            if ns in self._of_ns:
                return
            account = self._of_digest.get(digest)
            if account is None:
                account = self._open(self._named.get(digest, self._each), digest)
            self._join(account, ns)

    def tenant(self, ns: int) -> int:
        """Whose `ns` is."""
        if ns not in self._of_ns:
            with self._lock:
                if ns not in self._of_ns:
                    self._join(self._open(self._each, None), ns)
        account = self._of_ns[ns]
        return NOBODY if account is None else account.tenant

    def namespace(self, tenant: int) -> int:
        """One of the tenant's, to find its blocks in the index."""
        return next(iter(self._of_tenant[tenant].namespaces))

    def holds(self, ns: int) -> bool:
        """Its tenant has blocks, also such as are not indexed: they stay on its account."""
        account = self._of_ns.get(ns)
        return account is not None and self._table.tenant(account.tenant).blocks > 0

    def gone(self, namespaces: Sequence[int]) -> None:
        """A tenant ends with the last of its namespaces."""
        with self._lock:
            for ns in namespaces:
                account = self._of_ns.pop(ns, None)
                if account is None:
                    continue
                del account.namespaces[ns]
                if not account.namespaces:
                    del self._of_tenant[account.tenant]
                    self._free.append(account.tenant)
                    if account.digest is not None:
                        del self._of_digest[account.digest]

    def _join(self, account: _Account | None, ns: int) -> None:
        if account is not None:
            account.namespaces[int(ns)] = None
        self._of_ns[int(ns)] = account

    def _open(self, quota: Quota | None, digest: bytes | None) -> _Account | None:
        if quota is None:
            return None
        tenant = self._free.pop() if self._free else len(self._of_tenant) + 1
        if tenant > _MOST:
            raise ConfigError(
                f"a pool counts at most {_MOST} tenants at once", setting="quotas", value=tenant, limit=_MOST
            )
        self._table.set_tenants(tenant + 1)
        self._table.set_quota(tenant, *quota.slots(self._block_bytes))
        account = self._of_tenant[tenant] = _Account(tenant, digest)
        if digest is not None:
            self._of_digest[digest] = account
        return account

    def stats(self) -> dict[int, TenantStats]:
        """By one namespace of each tenant."""
        with self._lock:
            return {next(iter(one.namespaces)): self._of(tenant) for tenant, one in self._of_tenant.items()}

    def _of(self, tenant: int) -> TenantStats:
        counts = self._table.tenant(tenant)
        limits = [None if limit == NO_LIMIT else limit for limit in (*counts.limit, counts.block_limit)]
        return TenantStats(
            used=(counts.used[0], counts.used[1]), historical=(counts.historical[0], counts.historical[1]),
            limit=(limits[0], limits[1]), blocks=counts.blocks, block_limit=limits[2],
        )  # fmt: skip


@dataclass(slots=True)
class _Account:
    tenant: int
    digest: bytes | None  # None: nobody told whose its one namespace is
    namespaces: dict[int, None] = field(default_factory=dict)  # a set in order
