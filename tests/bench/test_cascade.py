"""Decoding behind a shared prefix: what is counted, and what bounds it. Times are not looked at."""

from __future__ import annotations

import pytest

from octavo.backends.cpu import _native
from octavo.bench.attention_steps import AttentionSteps
from octavo.bench.cascade import CascadeCase, attention_case, streams_of, with_sizes
from octavo.bench.limits import Limits, PeakProbe, ReadProbe
from octavo.models.program import Attention

READ, BF16, F32 = 1e9, 4e9, 2e9
PEAKS = [PeakProbe("bf16", "", 1, BF16, 1.0), PeakProbe("f32", "", 1, F32, 1.0)]
LIMITS = Limits(1, 512, [ReadProbe("memory", 1, 1, 0, True, 1, READ, 1.0)], PEAKS)


@pytest.mark.parametrize(("kv_dtype", "peak", "doubled"), [("bf16", BF16, 1.5), ("f32", F32, 1.0), ("int8", BF16, 1.0)])
def test_limit_and_counts(kv_dtype: str, peak: float, doubled: float) -> None:
    ops = [Attention("o", "q", "k", "v", i, 4, 2, 32, 0.2, window=window) for i, window in enumerate((None, 100))]
    steps = AttentionSteps(_native.isa_levels()[-1], 1, ops, kv_dtype, 400)
    case = CascadeCase(num_own=15, seconds=0)
    try:
        row = attention_case(steps, LIMITS, 3, 1030, case)
        token_bytes = steps.bytes_per_token // 2  # of a layer
    finally:
        steps.close()
    seen, shared = 1030 + 16, 1024  # whole blocks are shared
    operations = 4 * 4 * 32 * 3 * (seen + 100)
    read_s = (shared + 3 * (seen - shared) + (100 - 22) + 3 * 22) * token_bytes / READ
    assert row.limit == (("bf16" if peak == BF16 else "f32") if operations / peak > read_s else "read")
    assert row.share is not None and row.exact_share is not None
    assert row.share * row.together_s == pytest.approx(max(read_s, operations / peak))
    assert row.exact_share * row.together_s == pytest.approx(max(read_s, doubled * operations / peak))
    assert row.together_bytes == shared * token_bytes
    in_window = (seen + 15) // 16 - (seen - 100) // 16
    assert row.own_bytes == 3 * 16 * (2 + in_window) * token_bytes
    assert row.alone_bytes == 3 * 16 * ((seen + 15) // 16 + in_window) * token_bytes


def test_streams_share_whole_blocks() -> None:
    streams = streams_of(3, 40, CascadeCase(num_own=20), 16)
    assert [s.position for s in streams] == [60, 60, 60]
    tables = [list(s.block_table) for s in streams]
    assert all(table[:2] == [0, 1] and len(table) * 16 > 60 for table in tables)
    assert len({block for table in tables for block in table[2:]}) == sum(len(table) - 2 for table in tables)


def test_sizes_given_are_for_both_levels() -> None:
    case = with_sizes(CascadeCase(), (2,), (7, 8))
    assert (case.streams, case.engine_streams, case.shared, case.engine_shared) == ((2,), (2,), (7, 8), (7, 8))
    assert with_sizes(CascadeCase(), (), ()) == CascadeCase()
