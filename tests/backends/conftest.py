"""The kernel path as a fixture."""

from __future__ import annotations

import pytest

from tests.conftest import isa_levels


@pytest.fixture(params=isa_levels())
def isa(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Each kernel path of this machine in turn; cpu backends made in the test take it."""
    monkeypatch.setenv("OCTAVO_ISA", request.param)
    return request.param
