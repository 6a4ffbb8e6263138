"""The chaos run (``tests/cluster/chaos.py``) as a test: $CHAOS_MINUTES minutes of it (soak), as root."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from octavo.bench import netns
from tests.cluster.chaos import run_chaos
from tests.cluster.chaos_report import ChaosCase

pytestmark = [pytest.mark.soak, pytest.mark.model, pytest.mark.skipif(netns.missing() is not None, reason=str(netns.missing()))]


@pytest.mark.parametrize("roles", [("both", "both", "both"), ("prefill", "decode", "both")], ids="-".join)
def test_chaos(roles: tuple[str, ...], smollm2_path: Path, tmp_path: Path) -> None:
    case = ChaosCase(str(smollm2_path), float(os.environ.get("CHAOS_MINUTES", "5")), seed=1, roles=roles)
    assert run_chaos(case, tmp_path).faults == []
