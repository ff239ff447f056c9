"""Whose prefix it is: model, layout, dtype, adapter, multimodal inputs and tenant. Knows no tree.

The same tokens under another identity are another prefix: no hit, in any tier, on any instance.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """All that must be equal for KV to be reused.

    `salt` separates tenants; it is used only to compute `digest` and never shown in repr, keys, metrics or logs.
    `tenant`: whose quota pays, where that is somebody behind several salts; None: each salt is a tenant. It is no part
    of what must be equal: the first that an identity comes with counts.
    """

    model: str = ""
    revision: str = ""
    layout: str = ""  # KVLayout.fingerprint()
    dtype: str = ""
    adapter: str = ""
    multimodal: tuple[bytes, ...] = ()
    salt: bytes = field(default=b"", repr=False)
    tenant: bytes | None = field(default=None, repr=False)

    @property
    def tenant_digest(self) -> bytes:
        """16 bytes that name the tenant without telling its salt."""
        return tenant_digest(self.salt if self.tenant is None else self.tenant)

    @property
    def digest(self) -> bytes:
        """16 bytes, the same in every process and on every platform.

        Each field is framed by its length, so no two identities share an encoding.
        """
        state = hashlib.blake2b(digest_size=16, person=b"poolweave-ident1")
        texts = (self.model, self.revision, self.layout, self.dtype, self.adapter)
        for part in (*(text.encode() for text in texts), *self.multimodal, self.salt):
            state.update(len(part).to_bytes(8, "little") + part)
        state.update(len(self.multimodal).to_bytes(8, "little"))
        return state.digest()


def tenant_digest(tenant: bytes) -> bytes:
    """How other processes name a tenant: 16 bytes, the same everywhere."""
    return hashlib.blake2b(tenant, digest_size=16, person=b"poolweave-tenant").digest()
