"""Clocks only move forward."""

from __future__ import annotations

import math

import pytest

from octavo.core.clock import Clock, VirtualClock, WallClock


def test_wall_clock_starts_at_zero_and_moves() -> None:
    clock: Clock = WallClock()
    first = clock.now()
    assert 0.0 <= first < 60.0 and clock.now() >= first


def test_virtual_clock_moves_when_told() -> None:
    clock = VirtualClock(2.0)
    clock.advance(0.5)
    clock.advance_to(3.0)
    assert clock.now() == 3.0
    for wrong in (-1.0, math.nan):
        with pytest.raises(ValueError, match="only moves forward"):
            clock.advance(wrong)
    for wrong in (2.9, math.nan):
        with pytest.raises(ValueError, match="already shows 3.0"):
            clock.advance_to(wrong)
    assert clock.now() == 3.0
