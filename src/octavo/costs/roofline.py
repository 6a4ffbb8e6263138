"""The roofline of a step: what the model's program reads and computes, over what the machine can read and compute.

The method (Williams, Waterman & Patterson, CACM 2009), op group by op group, because groups run one after the other: the matrices of the
layers, the output matrix, the attention. Each takes the larger of its operations over the machine's and its bytes over the machine's; they
add up with activations, sampling and the host's time. Peaks are multiplied by the share that good kernels reach, which is the one
estimate in it: on a datasheet machine expect the order of machines and settings to be right before any single figure is.
"""

from __future__ import annotations

from octavo.core.cost import StepShape
from octavo.core.step import StepPlan
from octavo.costs.machines import Machine
from octavo.costs.program_work import AttentionWork, ProgramWork
from octavo.costs.terms import CostTerms


class _Roofline:
    """What both kinds have in common."""

    def __init__(self, work: ProgramWork, machine: Machine) -> None:
        self.work = work
        self.machine = machine
        self._s_per_op = 1.0 / (machine.ops_per_s * machine.ops_share * machine.devices)
        self._s_per_byte = 1.0 / (machine.bytes_per_s * machine.bytes_share * machine.devices)

    def _without_attention(self, shape: StepShape) -> CostTerms:
        work, terms = self.work, CostTerms()
        if shape.num_rows:
            self._add_product(terms, work.linear_ops * shape.num_rows, work.linear_bytes)
            terms.activations = work.activation_bytes * shape.num_rows * self._s_per_byte
        if shape.num_logit_rows:
            self._add_product(terms, work.output_ops * shape.num_logit_rows, work.output_bytes)
            terms.sampling = work.logit_bytes * shape.num_logit_rows * self._s_per_byte
        terms.host = self.machine.host_s + self.machine.host_s_per_sequence * shape.num_sequences
        return terms

    def _add_product(self, terms: CostTerms, num_ops: float, num_bytes: float) -> None:
        ops_s, bytes_s = num_ops * self._s_per_op, num_bytes * self._s_per_byte
        if ops_s > bytes_s:
            terms.arithmetic += ops_s
        else:
            terms.weights += bytes_s

    def _add_attention(self, terms: CostTerms, layers: AttentionWork, num_pairs: int, num_context: int, num_rows: int) -> None:
        """KV of the context is read once for each sequence, that of the new rows written."""
        ops_s = layers.ops_per_pair * num_pairs * self._s_per_op
        bytes_s = layers.kv_bytes * (num_context + num_rows) * self._s_per_byte
        if ops_s > bytes_s:
            terms.attention += ops_s
        else:
            terms.kv += bytes_s


class RooflineCost(_Roofline):
    """A CostModel for models whose layers all see the whole context: everything follows from the shape of a step."""

    def seconds(self, plan: StepPlan) -> float:
        """See CostModel."""
        return self.seconds_of(StepShape.of(plan))

    def seconds_of(self, shape: StepShape) -> float:
        """As ``seconds`` of any plan of this shape."""
        return self.terms_of(shape).seconds

    def terms(self, plan: StepPlan) -> CostTerms:
        """The seconds of ``plan`` by what bounds them."""
        return self.terms_of(StepShape.of(plan))

    def terms_of(self, shape: StepShape) -> CostTerms:
        """As ``terms`` of any plan of this shape."""
        terms = self._without_attention(shape)
        for layers in self.work.attention:
            self._add_attention(terms, layers, shape.num_pairs, shape.num_context, shape.num_rows)
        return terms


class WindowedRooflineCost(_Roofline):
    """A CostModel for models with layers that see only so many positions back, which no shape tells: it wants the plan."""

    def seconds(self, plan: StepPlan) -> float:
        """See CostModel."""
        return self.terms(plan).seconds

    def terms(self, plan: StepPlan) -> CostTerms:
        """The seconds of ``plan`` by what bounds them."""
        shape = StepShape.of(plan)
        terms = self._without_attention(shape)
        for layers in self.work.attention:
            num_pairs, num_context = shape.num_pairs, shape.num_context
            if layers.window is not None:
                seen = [_seen(piece.start, len(piece.token_ids), layers.window) for piece in plan.slices]
                num_pairs, num_context = sum(pairs for pairs, _ in seen), sum(context for _, context in seen)
            self._add_attention(terms, layers, num_pairs, num_context, shape.num_rows)
        return terms


def _seen(start: int, num_rows: int, window: int) -> tuple[int, int]:
    """(pairs, positions read) of rows ``start ..`` that see at most ``window`` positions each, their own among them."""
    num_short = min(num_rows, max(0, window - start))  # rows that see all before them
    pairs = num_short * start + num_short * (num_short + 1) // 2 + (num_rows - num_short) * window
    return pairs, min(start + num_rows, window + num_rows - 1)


def roofline(work: ProgramWork, machine: Machine) -> RooflineCost | WindowedRooflineCost:
    """The roofline cost of a program on a machine, windows counted where it has some."""
    has_windows = any(layers.window is not None for layers in work.attention)
    return WindowedRooflineCost(work, machine) if has_windows else RooflineCost(work, machine)
