"""Looking in vain costs a hundredth of the time at most; what was found, and other sequences, end a nap."""

from __future__ import annotations

import pytest

from octavo.speculative.nap import Nap


@pytest.mark.parametrize(("host_s", "step_s"), [(2.5e-4, 1e-2), (2e-5, 3e-3), (1e-3, 2e-3), (1e-4, 1e-2)])
def test_the_share_of_looking_in_vain(host_s: float, step_s: float) -> None:
    nap, looks, steps = Nap(), 0, 3000
    for _ in range(steps):
        if not nap.begin(16):
            looks += 1
            nap.looked(0, host_s, step_s)
    assert looks * host_s <= max(0.01, host_s / step_s / 33) * steps * step_s * 1.01
    assert looks == steps if host_s < 0.01 * step_s else looks < steps


def test_what_ends_a_nap() -> None:
    nap = Nap()
    assert not nap.begin(4)
    nap.looked(0, 1e-3, 1e-3)
    assert nap.begin(4) and nap.asleep
    assert not nap.begin(5) and not nap.asleep  # another sequence
    nap.looked(0, 1e-3, 1e-3)
    assert nap.begin(5) and not nap.begin(5, may_sleep=False) and not nap.begin(5)  # a number of drafts is asked for
    nap.looked(3, 1e-3, 1e-3)  # something was found
    assert not nap.begin(5)
