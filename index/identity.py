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
    """

    model: str = ""
    revision: str = ""
    layout: str = ""  # KVLayout.fingerprint()
    dtype: str = ""
    adapter: str = ""
    multimodal: tuple[bytes, ...] = ()
    salt: bytes = field(default=b"", repr=False)

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
