"""What a program becomes: the phases of a layer, counted, because each is a meeting of all threads."""

from __future__ import annotations

from typing import Any

import pytest

from octavo.backends.base import BackendError
from octavo.backends.cpu.lowering import Handles, lower
from octavo.models.program import Embed, Linear, Program
from tests.backends.exactness import fixture_model


class Recorder:
    """Takes building calls as the native model does and keeps their names."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self.num_buffers = 0

    def add_buffer(self, width: int) -> int:
        self.num_buffers += 1
        return self.num_buffers - 1

    def __getattr__(self, name: str) -> Any:
        return lambda *args: self.calls.append((name, args))

    def phases(self) -> str:
        """One letter per phase: R row ops, M a group of matrices, A attention, S select, H head."""
        letters = {"matmul": "M", "attention": "A", "select": "S", "head": "H"}
        out: list[str] = []
        for name, _ in self.calls:
            if name == "begin_group":
                out.append("M")
                continue
            letter = letters.get(name, "R")
            if letter == "M" or (letter == "R" and out and out[-1] == "R"):
                continue
            out.append(letter)
        return "".join(out)


def lowered(program: Program) -> Recorder:
    recorder = Recorder()
    lower(program, recorder, Handles(lambda name: (0, True), lambda name: 0, lambda name: 0, lambda dim, base, scaling: 0))
    return recorder


@pytest.mark.parametrize("family", ["llama", "llama3", "mistral", "qwen2", "qwen3", "gemma2", "gemma3"])
def test_a_layer_is_ten_phases(family: str) -> None:
    program = fixture_model(family).program
    layer = "RMRARMRMRM"  # norm+quantise, qkv, rope+store, attention, quantise, o, norm+quantise, gate+up, act+quantise, down
    phases = lowered(program).phases()
    layers = len(program.kv_layers)
    # A layer's last matrix is followed by the next layer's norm in one run of row ops; the last layer selects its rows after attention.
    want = (layer * layers + "RH")[: -len(layer) - 2] + "RMRASRMRMRM" + "RH"
    assert phases == want


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_buffers_are_reused(family: str) -> None:
    assert lowered(fixture_model(family).program).num_buffers <= 9


def test_what_has_no_form_is_refused() -> None:
    ops = (Embed("h", "embed", 8), Linear("logits", "h", "embed", 8, 16, "bias"))
    program = Program("x", ops, {"embed": (16, 8), "bias": (16,)}, (), 8, 16, 8)
    with pytest.raises(BackendError, match="attention|bias"):
        lowered(program)
