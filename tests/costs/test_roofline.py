"""The roofline against a count by hand, op by op and row by row."""

from __future__ import annotations

import random
from array import array

import pytest

from octavo.core.cost import StepShape
from octavo.core.step import SequenceSlice, StepPlan
from octavo.costs.machines import Machine
from octavo.costs.program_work import AttentionWork, ProgramWork
from octavo.costs.roofline import RooflineCost, WindowedRooflineCost, roofline
from octavo.costs.terms import CostTerms
from octavo.models.program import Attention, Embed, KVLayer, Linear, Program

MACHINE = Machine("toy", "measured", ops_per_s=1e6, bytes_per_s=1e5, memory_bytes=1e6, ops_share=0.5, bytes_share=0.5, host_s=0.25,
                  host_s_per_sequence=0.125)  # fmt: skip
VOCAB, DIM = 30, 8


def program(windows: tuple[int | None, ...] = (None, None)) -> Program:
    """Attention layers of two heads on one KV head, each with one matrix behind it."""
    ops: list[object] = [Embed("x0", "embed", DIM)]
    for i, window in enumerate(windows):
        ops.append(Linear(f"q{i}", f"x{i}", f"layers.{i}.q", DIM, 8))
        ops.append(Linear(f"k{i}", f"x{i}", f"layers.{i}.k", DIM, 4))
        ops.append(Attention(f"a{i}", f"q{i}", f"k{i}", f"k{i}", i, 2, 1, 4, 1.0, None, window))
        ops.append(Linear(f"x{i + 1}", f"a{i}", f"layers.{i}.o", 8, DIM))
    ops.append(Linear("logits", f"x{len(windows)}", "output", DIM, VOCAB))
    weights = {op.weight: (op.out_features, op.in_features) for op in ops if isinstance(op, Linear)} | {"embed": (VOCAB, DIM)}
    layers = tuple(KVLayer(1, 4, window) for window in windows)
    return Program("toy", tuple(ops), weights, layers, DIM, VOCAB, 100).check()  # type: ignore[arg-type]


def plan_of(*slices: tuple[int, int, int]) -> StepPlan:
    """Slices are (start, rows, samples)."""
    return StepPlan(0, [SequenceSlice(i, start, [0] * rows, array("i"), n, [0] * n) for i, (start, rows, n) in enumerate(slices)])


def test_the_program_counts_itself() -> None:
    work = ProgramWork.of(program(), weight_bytes=0.5, kv_bytes_per_value=2.0, activation_bytes_per_value=4.0)
    per_layer = 8 * 8 + 8 * 4 + 8 * 8
    assert work.linear_ops == 2 * 2 * per_layer and work.linear_bytes == 0.5 * 2 * per_layer
    assert work.output_ops == 2 * DIM * VOCAB and work.output_bytes == 0.5 * DIM * VOCAB
    assert work.attention == (AttentionWork(2 * 4.0 * 2 * 4, 2 * 2 * 4 * 2.0),)
    assert work.activation_bytes == 2 * 4.0 * 2 * (8 + 4 + 8 + 8)
    assert work.kv_bytes_per_token == 32.0 and work.weight_bytes == work.linear_bytes + work.output_bytes
    sizes = {name: 7 for name in program().weights}
    assert ProgramWork.of(program(), sizes).linear_bytes == 6 * 7 and ProgramWork.of(program(), sizes).output_bytes == 7


def test_each_group_takes_the_larger_of_its_two_times() -> None:
    work = ProgramWork.of(program(), 2.0)
    cost, op_s, byte_s = RooflineCost(work, MACHINE), 1 / 5e5, 1 / 5e4
    one = cost.terms(plan_of((10, 1, 1)))
    assert one.weights == pytest.approx((work.linear_bytes + work.output_bytes) * byte_s) and one.arithmetic == 0.0
    assert one.kv == pytest.approx(32 * (11 + 1) * byte_s) and one.attention == 0.0
    assert one.activations == pytest.approx(work.activation_bytes * byte_s) and one.sampling == pytest.approx(4 * VOCAB * byte_s)
    assert one.host == 0.25 + 0.125
    many = cost.terms(plan_of((0, 60, 1), (40, 1, 0)))
    assert many.arithmetic == pytest.approx(work.linear_ops * 61 * op_s)
    assert many.weights == pytest.approx(work.output_bytes * byte_s)
    pairs = 60 * 61 // 2 + 41
    assert many.attention + many.kv == pytest.approx(max(64 * pairs * op_s, 32 * (60 + 41 + 61) * byte_s))
    assert many.seconds == pytest.approx(sum(getattr(many, name) for name in CostTerms.__slots__))


def test_rows_without_logits_do_without_the_output_matrix() -> None:
    work = ProgramWork.of(program(), 2.0)
    cost = RooflineCost(work, MACHINE)
    with_logits, without = cost.terms(plan_of((0, 1, 1))), cost.terms(plan_of((0, 1, 0)))
    assert with_logits.weights - without.weights == pytest.approx(work.output_bytes / 5e4)
    assert without.sampling == 0.0


def test_devices_share_a_step_and_the_host_is_one() -> None:
    work, plan = ProgramWork.of(program(), 2.0), plan_of((0, 30, 1))
    one, four = RooflineCost(work, MACHINE).terms(plan), RooflineCost(work, MACHINE.times(4)).terms(plan)
    assert four.host == one.host and four.seconds - four.host == pytest.approx((one.seconds - one.host) / 4)


def test_a_plan_costs_what_its_shape_costs() -> None:
    cost, plan = RooflineCost(ProgramWork.of(program()), MACHINE), plan_of((3, 9, 0), (40, 1, 1), (7, 1, 1))
    assert cost.seconds(plan) == cost.seconds_of(StepShape.of(plan)) == cost.terms(plan).seconds


def test_bottlenecks_have_names() -> None:
    cost = RooflineCost(ProgramWork.of(program(), 2.0), Machine("m", "measured", 1e6, 1e5, 1e6, 0.5, 0.5, host_s=0.0))
    slow = RooflineCost(ProgramWork.of(program(), 2.0), Machine("m", "measured", 1e4, 1e5, 1e6, 0.5, 0.5, host_s=0.0))
    assert cost.terms(plan_of((10, 1, 1))).bottleneck == "weights"
    assert cost.terms(plan_of((2000, 1, 1))).bottleneck == "kv"
    assert slow.terms(plan_of((0, 8, 0))).bottleneck == "arithmetic"
    assert cost.terms(plan_of((0, 3000, 0))).bottleneck == "attention"
    slow_host = RooflineCost(ProgramWork.of(program(), 2.0), MACHINE)
    assert slow_host.terms(plan_of((0, 1, 0))).bottleneck == "host"


@pytest.mark.parametrize("seed", range(20))
def test_windows_are_counted_row_by_row(seed: int) -> None:
    rng = random.Random(seed)
    windows = tuple(rng.choice((None, 3, 8, 20)) for _ in range(3))
    work = ProgramWork.of(program(windows), 2.0)
    cost = roofline(work, MACHINE)
    assert isinstance(cost, WindowedRooflineCost) == any(windows)
    slices = [(rng.randint(0, 30), rng.randint(1, 12), 1) for _ in range(rng.randint(1, 3))]
    expected_kv = expected_attention = 0.0
    for window in dict.fromkeys(windows):
        count = windows.count(window)
        pairs = context = rows = 0
        for start, num_rows, _ in slices:
            seen = [set(range(max(0, p - window + 1) if window else 0, p + 1)) for p in range(start, start + num_rows)]
            pairs += sum(map(len, seen))
            context += len(set().union(*seen))
            rows += num_rows
        ops_s, bytes_s = count * 32 * pairs / 5e5, count * 16 * (context + rows) / 5e4
        expected_attention += ops_s if ops_s > bytes_s else 0.0
        expected_kv += 0.0 if ops_s > bytes_s else bytes_s
    terms = cost.terms(plan_of(*slices))
    assert terms.kv == pytest.approx(expected_kv) and terms.attention == pytest.approx(expected_attention)
    assert cost.seconds(plan_of(*slices)) == terms.seconds
