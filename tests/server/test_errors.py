"""What clients are told to do about errors."""

from __future__ import annotations

import pytest

from octavo.engine.event_stream import EngineUnavailable
from octavo.engine.outputs import GenerationError
from octavo.engine.serving import NO_WORKER
from octavo.server.errors import as_api_error


@pytest.mark.parametrize(
    ("error", "retry_after"),
    [
        (EngineUnavailable("shutting down"), b"5"),
        (EngineUnavailable("too much to do", 0.2), b"1"),
        (EngineUnavailable("too much to do", 2.1), b"3"),
        (EngineUnavailable("too much to do", float("inf")), b"60"),
        (GenerationError("no worker", NO_WORKER), b"5"),
    ],
)
def test_whoever_is_turned_away_is_told_when_to_come_again(error: Exception, retry_after: bytes) -> None:
    shown = as_api_error(error)
    assert (shown.status, shown.code, shown.headers) == (503, "unavailable", ((b"retry-after", retry_after),))
