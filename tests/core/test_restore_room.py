"""A restore takes no block that an older running sequence needs in the same step: nobody is preempted for what can wait."""

from __future__ import annotations

from typing import Any

import pytest

from octavo.core.request import SequenceStatus
from tests.core.harness import make_request
from tests.core.test_kv_tiers import prompt_of, run_one
from tests.core.tier_harness import TierHarness, ToyDisk


def step_watched(harness: TierHarness) -> tuple[int, int]:
    """Make a step; (blocks loaded, running sequences that were preempted by a plan that restores a younger one)."""
    before = list(harness.scheduler.running_sequences)
    plan = harness.begin()
    if plan is None:
        return 0, 0
    restorer = harness.scheduler._state.kv.restorer
    assert restorer is not None
    places = {id(seq): i for i, seq in enumerate(before)}
    restored = [places.get(id(seq), len(before)) for seq in restorer.sequences]
    victims = [seq for seq in before if seq.status is SequenceStatus.WAITING]
    harness.finish()
    return len(plan.block_loads), sum(any(places[id(seq)] < place for place in restored) for seq in victims)


@pytest.mark.parametrize(("options", "latency"), [({"max_itl_ms": 2.0}, 1), ({"chunked": False}, 2)], ids=str)
def test_older_streams_keep_their_blocks(options: dict[str, Any], latency: int) -> None:
    """A prompt is let in, and while it waits for the disk, or for its turn to load, the streams grow beyond what admission left them."""
    num_loads = num_preemptions = 0
    for num_blocks in range(18, 26):
        for size in range(1, 5):
            disk, prompt = ToyDisk(latency, failing=0.0, seed=0), prompt_of(40, 33)
            sizes = {"num_blocks": num_blocks, "num_tier_blocks": 16, "disk": disk, "budget": 24, "max_num_seqs": 8, **options}
            harness = TierHarness(**sizes)
            run_one(harness, "first", prompt)
            harness.flush()
            harness = TierHarness(**sizes)
            for i in range(4):
                harness.add(make_request(f"stream {i}", prompt_of(80 + i, size), max_tokens=20, ignore_eos=True))
            harness.step()
            harness.add(make_request("again", prompt, max_tokens=2, ignore_eos=True))
            while harness.scheduler.has_work:
                loads, preempted = step_watched(harness)
                num_loads, num_preemptions = num_loads + loads, num_preemptions + preempted
            harness.check_texts()
    assert num_loads > 100 and num_preemptions == 0
