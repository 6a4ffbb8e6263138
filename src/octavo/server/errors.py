"""Errors as the API shows them: a status and OpenAI's body {"error": {message, type, param, code}}, always strict JSON.

Owns the mapping from Octavo's exceptions to statuses. Messages name the field, the value and the limit; no trace ever leaves.
"""

from __future__ import annotations

import logging
import math

import msgspec

from octavo.core.request import ParameterError
from octavo.core.step import NO_TOKEN_ALLOWED
from octavo.engine.event_stream import EngineUnavailable
from octavo.engine.outputs import GenerationError
from octavo.engine.serving import NO_WORKER

logger = logging.getLogger("octavo.server")

RETRY_S = 5  # where nobody has a guess
LONGEST_RETRY_S = 60


class APIError(Exception):
    """An answer other than 200. ``param`` names the field of the request that is to blame."""

    def __init__(
        self, status: int, message: str, param: str | None = None, code: str | None = None, headers: tuple[tuple[bytes, bytes], ...] = ()
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = headers

    def body(self) -> bytes:
        return msgspec.json.encode({"error": self.content()})

    def content(self) -> dict[str, str | None]:
        return {"message": self.message, "type": _error_type(self.status), "param": self.param, "code": self.code}


def invalid(message: str, param: str | None = None, code: str | None = "invalid_value") -> APIError:
    """A 400: the request cannot be served as it stands."""
    return APIError(400, message, param, code)


def as_api_error(error: Exception) -> APIError:
    """What a client is told about ``error``."""
    if isinstance(error, APIError):
        return error
    if isinstance(error, ParameterError):
        return invalid(str(error), error.param, error.code)
    if isinstance(error, EngineUnavailable):
        return _unavailable(error, error.retry_after_s)
    if isinstance(error, GenerationError):
        if error.code == NO_TOKEN_ALLOWED:
            return invalid(str(error), None, NO_TOKEN_ALLOWED)
        if error.code == NO_WORKER:
            return _unavailable(error)
        return APIError(500, str(error), code="generation_failed")
    logger.error("request failed", exc_info=error)
    return APIError(500, "the server failed to answer; its log says why", code="internal_error")


def _unavailable(error: Exception, retry_after_s: float | None = None) -> APIError:
    """With when to come again, in whole seconds: as guessed, from 1 to ``LONGEST_RETRY_S``."""
    seconds = RETRY_S if retry_after_s is None else max(1, math.ceil(min(retry_after_s, LONGEST_RETRY_S)))
    return APIError(503, str(error), code="unavailable", headers=((b"retry-after", str(seconds).encode()),))


def _error_type(status: int) -> str:
    if status == 401:
        return "authentication_error"
    if status == 404:
        return "not_found_error"
    return "invalid_request_error" if status < 500 else "server_error"
