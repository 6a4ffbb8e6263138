"""Tiles that several streams share are walked once a step and layer: counted where they are walked, against a count made by hand.

The counts are exact and no time is looked at. That no bit changes is compared here for odd trees, and in test_exactness.py for models.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.backends.cpu import _native
from octavo.bench.attention_steps import AttentionSteps, Stream
from octavo.models.program import Attention

BLOCK, TILE, UNIT = 16, 64, 16  # tokens: of a block; that are walked together; that are counted
LAYERS, HEADS, KV_HEADS, HEAD_DIM = 2, 2, 1, 16
TILE_BYTES = 2 * UNIT * HEAD_DIM * 2  # keys and values of UNIT tokens and a KV head, bf16
NUM_BLOCKS = 4096
LEAST = 8  # tiles that two streams share, or they are not walked together; most tests here set it to 1
WORTH, WORTH_MEETING = 4, 16  # tiles that must be saved, on one thread and for several to meet


def attention(window: int | None = None) -> Attention:
    return Attention("out", "q", "k", "v", 0, HEADS, KV_HEADS, HEAD_DIM, 0.25, window=window)


def make_steps(threads: int = 1, ops: Sequence[Attention] = (attention(),) * LAYERS, block_size: int = BLOCK) -> AttentionSteps:
    return AttentionSteps(_native.isa_levels()[-1], threads, ops, "bf16", NUM_BLOCKS * BLOCK // block_size, block_size)


@pytest.fixture(scope="module")
def steps() -> Iterator[AttentionSteps]:
    made = make_steps()
    yield made
    made.close()


@pytest.fixture(scope="module")
def two_threads() -> Iterator[AttentionSteps]:
    made = make_steps(2)
    yield made
    made.close()


class Blocks:
    """Hands out blocks that nobody else has, in no order."""

    def __init__(self, num_blocks: int = NUM_BLOCKS) -> None:
        self._free = list(range(num_blocks))
        random.Random(5).shuffle(self._free)

    def take(self, num_tokens: int, block_size: int = BLOCK) -> list[int]:
        return [self._free.pop() for _ in range(-(-num_tokens // block_size))]


def behind(prefix: Sequence[int], num_shared: int, own: int, blocks: Blocks, block_size: int = BLOCK) -> Stream:
    """A stream that shares the whole blocks of the first ``num_shared`` tokens and has ``own`` tokens more, the new one included."""
    num_tokens, whole = num_shared + own, num_shared // block_size
    return Stream(num_tokens - 1, [*prefix[:whole], *blocks.take(num_tokens - whole * block_size, block_size)])


def reads(steps: AttentionSteps, streams: Sequence[Stream], together: bool = True, least: int = 1) -> tuple[int, int]:
    """(units walked for several streams, for one) in a step of one layer and KV head."""
    steps.native.walk_together(together, least)
    steps.native.count_kv_reads(True)
    steps.step(streams)
    counted = steps.native.kv_reads()
    steps.native.count_kv_reads(False)
    steps.native.walk_together(True)
    per_layer = [n / (LAYERS * TILE_BYTES) for n in counted]
    assert all(n == int(n) for n in per_layer)
    return int(per_layer[0]), int(per_layer[1])


def results(steps: AttentionSteps, streams: Sequence[Stream], together: bool, least: int = 1) -> bytes:
    logits = np.empty((sum(s.num_rows for s in streams), 16), np.float32)
    steps.native.walk_together(together, least)
    steps.step(streams, logits)
    steps.native.walk_together(True)
    assert np.isfinite(logits).all()
    return logits.tobytes()


def check_together(steps: AttentionSteps, streams: Sequence[Stream]) -> None:
    """No bit changes by walking together, and that is what is done where nobody says otherwise."""
    assert results(steps, streams, True) == results(steps, streams, False)
    steps.native.count_kv_reads(True)
    steps.step(streams)
    assert steps.native.kv_reads()[0] > 0
    steps.native.count_kv_reads(False)


def units(num_tokens: int) -> int:
    return -(-num_tokens // UNIT)


def twin(streams: Sequence[Stream]) -> tuple[int, int]:
    """The same by brute force: each tile of each stream, whole in what it sees, counts once for all streams whose blocks up to its end
    are the same; what is in no such tile counts for each."""
    holders: dict[tuple[int, ...], int] = {}
    for s in streams:
        for end in range(TILE, s.position + 2, TILE):
            key = tuple(s.block_table[: end // BLOCK])
            holders[key] = holders.get(key, 0) + 1
    together = sum(TILE // UNIT for count in holders.values() if count > 1)
    saved = sum(count - 1 for count in holders.values())
    everything = sum(units(s.position + 1) for s in streams)
    if saved < WORTH:
        return 0, everything
    return together, everything - sum(count * TILE // UNIT for count in holders.values() if count > 1)


@pytest.mark.parametrize("num_shared", [0, 1, 15, 16, 17, 63, 64, 127, 128, 255, 256, 4095, 4096, 4097, 8000])
def test_shared_tiles_are_walked_once(steps: AttentionSteps, num_shared: int) -> None:
    """16 streams: each whole tile that they share once, not 16 times; of the rest what each sees."""
    blocks = Blocks()
    prefix = blocks.take(num_shared)
    streams = [behind(prefix, num_shared, 5 + i, blocks) for i in range(16)]
    shared_tokens = num_shared // BLOCK * BLOCK // TILE * TILE
    if shared_tokens == 0 or 15 * shared_tokens // TILE < WORTH:
        shared_tokens = 0
    own = sum(units(num_shared + 5 + i) - shared_tokens // UNIT for i in range(16))
    assert reads(steps, streams) == (shared_tokens // UNIT, own) == twin(streams)
    assert reads(steps, streams, together=False) == (0, sum(units(num_shared + 5 + i) for i in range(16)))
    assert results(steps, streams, True) == results(steps, streams, False)


@pytest.mark.parametrize("tiles", [1, LEAST - 1, LEAST, LEAST + 1])
def test_what_two_streams_share_is_worth_a_state(steps: AttentionSteps, tiles: int) -> None:
    """Three streams share ``tiles``; a fourth shares one tile less than is worth it with each of them, and is walked alone."""
    blocks = Blocks()
    prefix = blocks.take(tiles * TILE)
    streams = [behind(prefix, tiles * TILE, 40, blocks) for _ in range(3)]
    streams.append(behind(prefix, min(tiles, LEAST - 1) * TILE, 40, blocks))
    together, alone = reads(steps, streams, least=LEAST)
    assert together == (units(tiles * TILE) if tiles >= LEAST else 0)
    assert together + alone == sum(units(s.position + 1) for s in streams) - (2 * units(tiles * TILE) if tiles >= LEAST else 0)
    assert results(steps, streams, True, LEAST) == results(steps, streams, False)


@pytest.mark.parametrize("num_streams", [2, 11, 12, 16, 32, 48])
def test_by_phases_and_by_panels_alike(two_threads: AttentionSteps, num_streams: int) -> None:
    """Few streams go by phases, many by panels of two threads: the shared tiles are walked once by both threads together."""
    blocks = Blocks()
    prefix = blocks.take(4096)
    streams = [behind(prefix, 4096, 40, blocks) for _ in range(num_streams)]
    assert reads(two_threads, streams) == (units(4096), num_streams * units(40))
    assert results(two_threads, streams, True) == results(two_threads, streams, False)


def test_a_short_prefix_may_be_walked_once_a_thread(two_threads: AttentionSteps) -> None:
    """Each panel's thread walks it for its half of the streams."""
    blocks = Blocks()
    prefix = blocks.take(256)
    streams = [behind(prefix, 256, 10, blocks) for _ in range(16)]
    assert reads(two_threads, streams) == (2 * units(256), 16 * units(10))
    assert results(two_threads, streams, True) == results(two_threads, streams, False)


def test_too_little_to_walk_together_for(steps: AttentionSteps, two_threads: AttentionSteps) -> None:
    """Two streams behind 15 tiles save less than a meeting of two threads costs; one thread has nobody to meet."""
    blocks = Blocks()
    prefix = blocks.take(2048)
    for made, least in ((steps, WORTH), (two_threads, WORTH_MEETING)):
        for num_tiles, together in ((least - 1, 0), (least, units(least * TILE))):
            streams = [behind(prefix, num_tiles * TILE, 3, blocks) for _ in range(2)]
            assert reads(made, streams)[0] == together


def test_groups_stand_anywhere_in_the_step(steps: AttentionSteps) -> None:
    """Two prefixes, their streams in turn, and some that share nothing."""
    blocks = Blocks()
    first, second = blocks.take(1000), blocks.take(640)
    streams = []
    for i in range(4):
        streams += [behind(first, 1000, 3 + i, blocks), behind(second, 640, 7, blocks), behind([], 0, 200 + i, blocks)]
    shared = (992 // TILE * TILE, 640)
    assert reads(steps, streams) == (sum(units(n) for n in shared), reads(steps, streams, False)[1] - 4 * sum(units(n) for n in shared))
    assert reads(steps, streams) == twin(streams)
    assert results(steps, streams, True) == results(steps, streams, False)


@pytest.mark.parametrize("branch", [192, 1024, 1000])
def test_a_tree(steps: AttentionSteps, branch: int) -> None:
    """A and B share 64 tokens more than A and C, and then D half of what all do: every tile of the tree once."""
    blocks = Blocks()
    trunk = blocks.take(branch)
    a = behind(trunk, branch, 900, blocks)
    longer = branch // TILE * TILE + TILE
    streams = [behind(trunk, branch, 80, blocks), a, behind(trunk, branch // 2, 700, blocks)]
    streams += [behind(a.block_table, longer, own, blocks) for own in (20, 33)]
    streams += [behind(trunk, branch, 90, blocks) for _ in range(12)]
    assert reads(steps, streams) == twin(streams)
    assert reads(steps, streams)[0] == units(longer)
    assert results(steps, streams, True) == results(steps, streams, False)


def test_a_window_sees_too_little_of_its_beginning(steps: AttentionSteps) -> None:
    blocks = Blocks()
    prefix = blocks.take(2048)
    streams = [behind(prefix, 2048, 30, blocks) for _ in range(16)]
    mixed = make_steps(ops=(attention(window=100), attention()))
    try:
        mixed.native.count_kv_reads(True)
        mixed.step(streams)
        in_window = units(2078) - (2078 - 100) // UNIT
        assert mixed.native.kv_reads() == (units(2048) * TILE_BYTES, 16 * (units(30) + in_window) * TILE_BYTES)
        assert results(mixed, streams, True) == results(mixed, streams, False)
    finally:
        mixed.close()


@pytest.mark.parametrize("block_size", [32, 64, 128])
def test_larger_blocks(block_size: int) -> None:
    made, blocks = make_steps(block_size=block_size), Blocks(NUM_BLOCKS * BLOCK // block_size)
    try:
        prefix = blocks.take(1024, block_size)
        streams = [behind(prefix, 1000, 100, blocks, block_size) for _ in range(8)]
        shared = 1000 // block_size * block_size // TILE * TILE
        assert reads(made, streams) == (units(shared), 8 * (units(1100) - units(shared)))
        assert results(made, streams, True) == results(made, streams, False)
    finally:
        made.close()


def test_counting_begins_at_zero_and_ends(steps: AttentionSteps) -> None:
    stream = [Stream(0, array("i", [3]))]
    assert reads(steps, stream) == (0, 1)
    steps.step(stream)
    assert steps.native.kv_reads() == (0, 0)  # not counted
    steps.native.count_kv_reads(True)
    steps.step(stream)
    steps.step(stream)
    assert steps.native.kv_reads() == (0, 2 * LAYERS * TILE_BYTES)
    steps.native.count_kv_reads(False)


@st.composite
def forests(draw: st.DrawFn) -> list[Stream]:
    """Streams that go on from a part of another one's blocks, or from nothing."""
    blocks, made = Blocks(), list[Stream]()
    for _ in range(draw(st.integers(2, 14))):
        parent = draw(st.sampled_from(made)) if made and draw(st.integers(0, 5)) else None
        kept = draw(st.integers(0, parent.position // BLOCK)) if parent else 0
        made.append(behind(parent.block_table if parent else [], kept * BLOCK, draw(st.integers(1, 400)), blocks))
    return draw(st.permutations(made))


@given(streams=forests())
@settings(max_examples=60, deadline=None)
def test_any_forest_against_brute_force(steps: AttentionSteps, two_threads: AttentionSteps, streams: list[Stream]) -> None:
    assert reads(steps, streams) == twin(streams)
    for made in (steps, two_threads):
        assert results(made, streams, True) == results(made, streams, False)


@pytest.mark.parametrize(("num_shared", "walks"), [(512, 2), (1984, 2), (2048, 1)])
def test_threads_meet_for_a_long_prefix_alone(two_threads: AttentionSteps, num_shared: int, walks: int) -> None:
    """16 streams in two panels: a prefix of 32 tiles is walked once for both, a shorter one once in each, without a meeting."""
    blocks = Blocks()
    prefix = blocks.take(num_shared)
    streams = [behind(prefix, num_shared, 10, blocks) for _ in range(16)]
    assert reads(two_threads, streams) == (walks * units(num_shared), 16 * units(10))
    assert results(two_threads, streams, True) == results(two_threads, streams, False)


@pytest.mark.parametrize("kv_dtype", ["bf16", "f16", "f32", "int8"])
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_no_bit_changes_on_any_kernel_path(isa: str, threads: int, kv_dtype: str) -> None:
    """A tree behind a long prefix, walked by all threads; few streams by phases, and many by panels."""
    made = AttentionSteps(isa, threads, (attention(),) * LAYERS, kv_dtype, 600)
    blocks = Blocks(600)
    trunk = blocks.take(2304)
    parent = behind(trunk, 2304, 300, blocks)
    streams = [behind(trunk, 2304, 1 + 9 * i, blocks) for i in range(12)]
    streams += [parent, *(behind(parent.block_table, 2432, 5 + i, blocks) for i in range(6))]
    streams += [behind(trunk, 1000, 40, blocks), behind([], 0, 90, blocks)]
    try:
        for chosen in (streams, streams[9:14]):
            check_together(made, chosen)
    finally:
        made.close()


@pytest.mark.parametrize("kv_dtype", ["bf16", "int8"])
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_rows_that_verify_drafts_walk_with_others(isa: str, threads: int, kv_dtype: str) -> None:
    """Streams of 1 to 17 rows, the last of which is too many; several heads to a KV head, and more rows to walk than fit one pass."""
    op = Attention("out", "q", "k", "v", 0, 6, 2, 24, 0.25)
    made, blocks = AttentionSteps(isa, threads, (op,) * LAYERS, kv_dtype, 700), Blocks(700)
    trunk = blocks.take(2304)
    streams = [behind(trunk, 2304, 40 + 7 * i, blocks) for i in range(17)]
    streams += [behind(trunk, 1040, 30 + i, blocks) for i in range(3)]
    streams = [Stream(s.position - i, s.block_table, i + 1) for i, s in enumerate(streams[:17])] + streams[17:]
    try:
        for chosen in (streams, streams[::5], streams[1:4], streams[12:]):
            check_together(made, chosen)
    finally:
        made.close()
