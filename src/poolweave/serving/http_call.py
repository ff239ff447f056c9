"""One call to a door from a program without an event loop. Knows no route."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from typing import Any

from poolweave.errors import ConfigError, PeerLost, PoolweaveError

_TIMEOUT_S = 10.0


def get_json(url: str, key: str | None = None) -> dict[str, Any]:
    """The JSON object at `url`. Raises PeerLost when nobody answers, ConfigError for what is no URL, PoolweaveError
    with the server's own words when it refuses."""
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    try:
        request = urllib.request.Request(url, headers=headers)
    except ValueError as error:
        raise ConfigError(f"{url!r} is no URL: {error}", setting="url", value=url) from error
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as answer:
            found = json.load(answer)
    except urllib.error.HTTPError as error:
        said = error.read(1000).decode(errors="replace")
        raise PoolweaveError(f"{url} answered {error.code}: {said}") from error
    except (OSError, ValueError) as error:
        raise PeerLost(f"{url} does not answer: {error}", peer=url, part="http", reason=str(error)) from error
    if not isinstance(found, dict):
        raise PoolweaveError(f"{url} answered no JSON object; is it a poolweave door?")
    return found
