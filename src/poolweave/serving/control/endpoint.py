"""Where control messages are taken, as text: tcp://HOST:PORT or ipc://PATH."""

from __future__ import annotations

from poolweave.errors import ConfigError

_MAX_PORT = 65535


def check_endpoint(url: str, setting: str, *, least_port: int) -> None:
    """Raises ConfigError for a tcp:// address without a host and a port in [least_port, 65535]; others pass."""
    scheme, _, rest = url.partition("://")
    host, _, port = rest.rpartition(":")
    if scheme != "tcp" or (host and port.isdigit() and least_port <= int(port) <= _MAX_PORT):
        return
    raise ConfigError(
        f"{setting}={url!r} wants tcp://HOST:PORT with a port in [{least_port}, {_MAX_PORT}]",
        setting=setting, value=url, limit=_MAX_PORT,
    )  # fmt: skip
