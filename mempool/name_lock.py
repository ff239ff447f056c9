"""NameLock: one live owner a name on a machine. The kernel frees it when the owner dies, however it dies."""

from __future__ import annotations

import errno
import socket

from poolweave.errors import AddressInUse, ConfigError, SystemCallFailed

_MAX_NAME = 80  # an abstract socket name has 107 bytes, prefix included


class NameLock:
    """Holds `name` until closed: the bind of an abstract Unix socket, so nothing is left on disk.

    Raises AddressInUse when another live owner (of this machine's network namespace) has it.
    """

    def __init__(self, name: str) -> None:
        if not isinstance(name, str) or not name or len(name.encode()) > _MAX_NAME or "\0" in name or "/" in name:
            raise ConfigError(
                f"instance={name!r} is no name: 1 to {_MAX_NAME} bytes without '/'", setting="instance", value=name
            )
        self.name = name
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._socket.bind(f"\0poolweave/pool/{name}")
        except OSError as error:
            self._socket.close()
            if error.errno == errno.EADDRINUSE:
                raise AddressInUse(
                    f"a live pool owns the name {name!r}; choose another instance name, or close that pool",
                    address=name, setting="instance",
                ) from None  # fmt: skip
            raise SystemCallFailed(f"cannot take the name {name!r}: {error.strerror}", errno=error.errno) from error

    def close(self) -> None:
        """Idempotent."""
        self._socket.close()
