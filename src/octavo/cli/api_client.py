"""Requests of the commands to a running server."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Any

import click

TIMEOUT_S = 10.0


def server_options(function: Callable) -> Callable:
    """--url and --api-key."""
    key = click.option("--api-key", envvar="OCTAVO_API_KEY", help="The server's API key (also $OCTAVO_API_KEY).")
    url = click.option("--url", default="http://127.0.0.1:8000", show_default=True, help="Where the server is.")
    return url(key(function))


def get_json(url: str, path: str, api_key: str | None, timeout_s: float = TIMEOUT_S) -> dict[str, Any]:
    """The JSON object at ``path``. Raises ClickException with the server's own sentence, or with why there is no answer."""
    return _json_of(url, path, api_key, timeout_s)


def post_json(url: str, path: str, api_key: str | None, body: dict[str, Any], timeout_s: float = TIMEOUT_S) -> dict[str, Any]:
    """The JSON object that answers ``body``. Raises as ``get_json``."""
    return _json_of(url, path, api_key, timeout_s, json.dumps(body).encode())


def _json_of(url: str, path: str, api_key: str | None, timeout_s: float, data: bytes | None = None) -> dict[str, Any]:
    if not url.startswith(("http://", "https://")):
        raise click.BadParameter(f"{url!r} does not begin with http:// or https://", param_hint="'--url'")
    headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
    if data is not None:
        headers["Content-Type"] = "application/json"
    try:
        request = urllib.request.Request(url.rstrip("/") + path, data, headers)
        with urllib.request.urlopen(request, timeout=timeout_s) as response:
            content = json.load(response)
    except urllib.error.HTTPError as error:
        raise click.ClickException(_message(error)) from None
    except (urllib.error.URLError, OSError) as error:
        reason = getattr(error, "reason", error)
        raise click.ClickException(f"no server answers at {url}: {reason}") from None
    except ValueError as error:
        raise click.ClickException(f"{url} is no Octavo server: {error}") from None
    if not isinstance(content, dict):
        raise click.ClickException(f"{url} is no Octavo server: its answer is no JSON object")
    return content


def _message(error: urllib.error.HTTPError) -> str:
    try:
        return str(json.load(error)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"the server answered with status {error.code}"
