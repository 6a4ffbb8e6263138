"""Workers over HTTP: who there is, taking one out and having it back, replacing all of them one after another. Owns nothing; the engine's
``Cluster`` does it.

What changes the cluster is only done for whoever has the server's key: without one, everybody who reaches the port could take it down.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import msgspec

from octavo.engine.serving import Cluster, UnknownWorker
from octavo.server.errors import APIError, invalid
from octavo.server.openai_types import decode_object, param_of


class WorkerRequest(msgspec.Struct, forbid_unknown_fields=True):
    worker: str


class RestartRequest(msgspec.Struct, forbid_unknown_fields=True):
    pass


Body = TypeVar("Body", bound=msgspec.Struct)


class ClusterRoutes:
    """``cluster`` None: the server has no workers, and says so."""

    def __init__(self, cluster: Cluster | None, has_key: bool) -> None:
        self._cluster = cluster
        self._has_key = has_key

    def status(self) -> dict[str, Any]:
        """Raises APIError 404 without workers."""
        return {"object": "cluster"} | self._workers().status()

    async def drain(self, body: bytes) -> dict[str, Any]:
        """Raises APIError: 404 for an unknown worker, 409 when that cannot be now, 403 without a key, 400 for a bad body."""
        return await self._change(self._guarded().drain, body)

    async def undrain(self, body: bytes) -> dict[str, Any]:
        """Raises APIError as ``drain``."""
        return await self._change(self._guarded().undrain, body)

    async def _change(self, change: Callable[[str], Awaitable[dict[str, Any]]], body: bytes) -> dict[str, Any]:
        """Do it to the worker that the body names."""
        request = _read(body, WorkerRequest)
        try:
            return {"object": "cluster.worker"} | await change(request.worker)
        except UnknownWorker as error:
            raise APIError(404, f"worker: {error}", "worker", "worker_not_found") from None
        except ValueError as error:
            raise APIError(409, str(error), "worker", "not_now") from None

    async def restart(self, body: bytes) -> dict[str, Any]:
        """Raises APIError: 409 when that cannot be begun now, 403 without a key."""
        cluster = self._guarded()
        _read(body, RestartRequest)
        try:
            return {"object": "cluster"} | await cluster.restart()
        except ValueError as error:
            raise APIError(409, str(error), None, "not_now") from None

    def _workers(self) -> Cluster:
        if self._cluster is None:
            raise APIError(404, "this server has no workers; its engine runs in its own process", None, "no_cluster")
        return self._cluster

    def _guarded(self) -> Cluster:
        cluster = self._workers()
        if not self._has_key:
            message = "a server without an API key lets nobody change its workers; start it with --api-key"
            raise APIError(403, message, None, "key_needed")
        return cluster


def _read(body: bytes, kind: type[Body]) -> Body:
    """A JSON body, which may be empty where no field is needed. Unknown fields are refused: what is done cannot be undone."""
    try:
        return msgspec.convert(decode_object(body or b"{}"), kind)
    except msgspec.ValidationError as error:
        message = str(error)
        param, is_missing = param_of(message), "missing required field" in message
        raise invalid(f"{param or 'the body'}: {message}", param, "missing_field" if is_missing else "invalid_type") from None
