"""What the KV pool's slots are used for: the parts add up, and are those that a count slot by slot finds."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest

from octavo.core.occupancy import KVOccupancy
from octavo.core.reservation import ReservedKV
from tests.core.harness import Harness, make_request


def slot_by_slot(harness: Harness) -> KVOccupancy:
    """Each slot by what it is: a token's, one to come, held in vain, or nobody's."""
    scheduler = harness.scheduler
    state, size = scheduler._state, scheduler._state.kv.block_size
    use: dict[tuple[int, int], int] = {}  # (block, offset) -> 3 token, 2 to come, 1 in vain: of a shared slot the highest counts
    for seq in state.running:
        written, final = seq.num_computed + seq.num_scheduled, state.limits.final_tokens(seq.request)
        blocks = [list(seq.block_table)]
        if isinstance(state.kv, ReservedKV):
            blocks = [list(range(chunk.first, chunk.first + chunk.num_units)) for chunk in state.kv._chunks[seq.seq_id]]
        for choice, held in enumerate(blocks):
            for position in range(len(held) * size):
                place = held[position // size], position % size
                kind = 3 if position < written and choice == 0 else 2 if position < final else 1
                if kind == 1 and isinstance(state.kv, ReservedKV) and position >= state.kv.limits.reserved_tokens(seq.request):
                    kind = 0
                use[place] = max(kind, use.get(place, 0))
    counts = [sum(1 for kind in use.values() if kind == wanted) for wanted in (3, 2, 1, 0)]
    cached = scheduler.num_cached_blocks * size
    return KVOccupancy(scheduler.num_blocks * size, *counts, cached, scheduler.num_blocks * size - len(use) - cached)


@pytest.mark.parametrize("reservation", ["paged", "max", "pow2", "oracle"])
@pytest.mark.parametrize("seed", range(8))
def test_the_count_equals_that_of_every_slot(reservation: str, seed: int) -> None:
    rng = random.Random(seed)
    block_size, num_blocks = rng.choice([(1, 48), (3, 24), (4, 12)])  # room for three times 16 tokens in chunks
    sizes: dict[str, Any] = {"num_blocks": num_blocks + rng.randint(0, 9), "block_size": block_size, "max_num_seqs": 6, "budget": 12}
    harness = Harness(max_model_len=16, caching=reservation == "paged" and seed % 2 == 0, reservation=reservation, **sizes)
    for i in range(12):
        prompt = [rng.randint(0, 1) for _ in range(rng.randint(1, 12))]
        harness.add(make_request(f"r{i}", prompt, seed=i, n=rng.choice([1, 1, 3]), max_tokens=rng.choice([0, 2, 6, None])))
    num_allocated = 0
    while harness.begin() is not None:
        found = harness.scheduler.kv_occupancy()
        assert found == slot_by_slot(harness)
        assert found.num_allocated + found.num_cached + found.num_free == found.num_slots
        assert found.num_allocated == harness.scheduler.num_used_blocks * sizes["block_size"]
        num_allocated += found.num_allocated
        harness.finish()
        assert harness.scheduler.kv_occupancy() == slot_by_slot(harness)
    assert num_allocated > 0
    idle = harness.scheduler.kv_occupancy()
    assert idle.num_allocated == 0 and math.isnan(idle.fill_ratio)


def test_by_hand() -> None:
    """10 prompt tokens and 3 of 6 output tokens whose KV is written, in blocks of 4 and chunks of a pool of 16 blocks."""
    want = {
        "paged": (13, 2, 1, 0),  # 4 blocks; token 16 needs no KV
        "oracle": (13, 2, 0, 1),  # 15 slots in a chunk of 16
        "pow2": (13, 2, 3, 14),  # 18 slots in a chunk of 32
        "max": (13, 2, 17, 0),  # 32 slots
    }
    for reservation, counts in want.items():
        harness = Harness(16, 4, 32, caching=False, reservation=reservation, budget=10)
        harness.add(make_request("r", [1] * 10, max_tokens=6, ignore_eos=True))
        for _ in range(3):
            harness.step()
        harness.begin()
        found = harness.scheduler.kv_occupancy()
        assert (found.num_token_states, found.num_to_come, found.num_never, found.num_rounding) == counts, reservation
        assert found.fill_ratio == 13 / sum(counts)
        assert found.num_external == 64 - sum(counts[:3])
        harness.finish()
