"""Whose KV is whose in a deployment: the salt that separates it, the tenant that pays, and how much that may be."""

from __future__ import annotations

import dataclasses
import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from poolweave.errors import ConfigError
from poolweave.index import Identity
from poolweave.types import parse_bytes


def salt_of(owner: str, cache_salt: str | None = None) -> bytes:
    """What separates KV: the client's own salt, and the tenant ("" where none is isolated). Same inputs, same KV."""
    if not owner and cache_salt is None:
        return b""
    state = hashlib.blake2b(digest_size=16, person=b"poolweave-salt1")
    for part in (owner, cache_salt or ""):
        state.update(len(part.encode()).to_bytes(8, "little") + part.encode())
    return state.digest()


class Owner(msgspec.Struct, frozen=True):
    """Whose a request's KV is: `salt` separates it from all others', `tenant` is the salt of whose quota pays for it;
    None: each salt's own."""

    salt: bytes = b""
    tenant: bytes | None = None

    def identity(self, model: Identity) -> Identity:
        """Of this owner's KV of a model."""
        return dataclasses.replace(model, salt=self.salt, tenant=self.tenant)


def owner_of(key: str, cache_salt: str | None = None) -> Owner:
    """Of what an isolated API key sends, or ("") all others together: they pay for whatever salts they choose."""
    return Owner(salt_of(key, cache_salt), salt_of(key))


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantQuota:
    """What one tenant may take of an instance's pool, as a TOML file spells it; None: any amount.

    `tenant`: the name of an isolated API key; "": each of the others, and all keys that are not isolated together.
    Raises ConfigError for what is no size, and for a quota that bounds nothing.
    """

    tenant: str = ""
    hbm: str | int | None = None
    dram: str | int | None = None
    total: str | int | None = None

    def __post_init__(self) -> None:
        caps = {name: cap for name in ("hbm", "dram", "total") if (cap := getattr(self, name)) is not None}
        if not caps:
            raise ConfigError(
                f"the quota of {self.tenant or 'each tenant'} bounds nothing; set hbm, dram or total", setting="quotas"
            )
        for name, cap in caps.items():
            parse_bytes(cap, f"quotas.{name}")


def check_quotas(quotas: Sequence[TenantQuota]) -> None:
    """Raises ConfigError for two of one tenant."""
    twice = [tenant for tenant, count in Counter(one.tenant for one in quotas).items() if count > 1]
    if twice:
        who = f"tenant {twice[0]!r}" if twice[0] else "each tenant"
        raise ConfigError(f"two quotas for {who}; keep one", setting="quotas", value=twice[0])
