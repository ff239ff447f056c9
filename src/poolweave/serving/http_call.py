"""One call to a door from a program without an event loop. Knows no route."""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request
from typing import Any

from poolweave.errors import ConfigError, PeerLost, PoolweaveError

_TIMEOUT_S = 10.0
_MOST_BYTES = 1000  # of a refusal


def get_json(url: str, key: str | None = None) -> dict[str, Any]:
    """The JSON object at `url`. Raises PeerLost when nobody answers, ConfigError for what is no URL, PoolweaveError
    with the server's own words when it refuses."""
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    try:
        request = urllib.request.Request(url, headers=headers)
    except ValueError as error:
        raise ConfigError(f"{url!r} is no URL: it begins with http:// or https://", setting="url", value=url) from error
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as answer:
            found = json.load(answer)
    except urllib.error.HTTPError as error:
        said = _words(error.read(_MOST_BYTES))
        hint = "; the key is --key or POOLWEAVE_API_KEY" if error.code == 401 else ""
        raise PoolweaveError(f"{url} answered {error.code}: {said}{hint}") from error
    except http.client.InvalidURL as error:
        raise ConfigError(f"{url!r} is no URL: {error}", setting="url", value=url) from error
    except ValueError as error:
        raise PoolweaveError(f"{url} answered no JSON; is it a poolweave door?") from error
    except (OSError, http.client.HTTPException) as error:
        why = error.reason if isinstance(error, urllib.error.URLError) else error
        reason = (why.strerror if isinstance(why, OSError) else None) or str(why) or type(why).__name__
        raise PeerLost(f"{url} does not answer: {reason}", peer=url, part="http", reason=reason) from error
    if not isinstance(found, dict):
        raise PoolweaveError(f"{url} answered no JSON object; is it a poolweave door?")
    return found


def _words(said: bytes) -> str:
    """A refusal's message; all that was said where it is no door's."""
    text = said.decode(errors="replace")
    try:
        return str(json.loads(text)["error"]["message"])
    except (ValueError, TypeError, KeyError):
        return text.strip() or "nothing"
