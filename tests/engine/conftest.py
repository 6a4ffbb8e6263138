"""What tests of engines share."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(params=["smollm2", "gemma3"])
def path(request: pytest.FixtureRequest) -> Path:
    """Each of the two real models."""
    return request.getfixturevalue(f"{request.param}_path")  # type: ignore[no-any-return]
