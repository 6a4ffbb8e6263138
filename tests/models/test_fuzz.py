"""Damaged model files: each is a clean error or a model that runs; never a crash, a hang, or memory beyond what good files need.

Every run damages 2,000 files, of which most are refused in a millisecond; the soak target 50,000, with another seed.
"""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.models.fuzz_files import Mutant, gguf_size_fields, model_mutants, run_in_child, write_bases

ROOT = Path(__file__).parents[2]
HEADROOM_BYTES = 32 << 20  # files of less than 0.6 MB that are widened to float32
CPU_HEADROOM_BYTES = 2 * HEADROOM_BYTES  # the weights once more, packed, and the address space of a thread's stack
FILE_TIMEOUT_S = 30.0  # a busy machine; a good file takes 10 ms


def check_mutants(folder: Path, count: int, seed: int, backend: str) -> Counter[str]:
    """Damage ``count`` files, assert that each was handled cleanly, and count the outcomes by kind of base and result."""
    bases = write_bases(folder)
    headroom_bytes = CPU_HEADROOM_BYTES if backend == "cpu" else HEADROOM_BYTES
    outcomes = run_in_child(bases, model_mutants(bases, count, seed), headroom_bytes, FILE_TIMEOUT_S, backend)
    bad = [f"{o.mutant.base.path.name}: {o.mutant.what}: {o.result}: {o.detail}" for o in outcomes if not o.is_good]
    assert not bad, "\n".join(bad)
    assert len(outcomes) == count
    return Counter(f"{'lie or cut' if o.mutant.must_fail else 'flipped'}, {o.result}" for o in outcomes)


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_2000_damaged_files(tmp_path, backend):
    counts = check_mutants(tmp_path, 2000, 1, backend)
    # The test would prove little if nothing ran, or if every flipped bit were refused.
    assert counts["flipped, runs"] >= 100 and counts["flipped, refused"] >= 100


@pytest.mark.soak
@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_50000_damaged_files(tmp_path, backend):
    print(dict(check_mutants(tmp_path, 50_000, 2, backend)))


def test_size_fields_of_a_good_file_are_found(tmp_path):
    """The lies are told about every kind of field."""
    names = {field.name for field in gguf_size_fields(write_bases(tmp_path)[0].content)}
    assert {"number of tensors", "number of pairs", "length of a key", "length of array tokenizer.ggml.tokens"} <= names
    assert {"length of tokenizer.ggml.tokens[0]", "length of a tensor name", "number of dimensions of output_norm.weight"} <= names
    assert {"dimension 1 of blk.0.ffn_up.weight", "offset of token_embd.weight"} <= names


def test_an_unharmed_file_counts_as_bad_where_an_error_is_due(tmp_path):
    """What the other tests rely on: the child tells a model that runs from one that is refused."""
    base = write_bases(tmp_path)[0]
    mutants = [Mutant(base, "nothing", base.content, must_fail) for must_fail in (True, False)]
    outcomes = run_in_child([base], iter(mutants), HEADROOM_BYTES, FILE_TIMEOUT_S)
    assert [(o.result, o.is_good) for o in outcomes] == [("runs", False), ("runs", True)]


def test_the_memory_limit_is_in_force():
    code = "from tests.models.fuzz_child import limit_address_space; limit_address_space({}); bytearray({})"
    for size, status in ((HEADROOM_BYTES // 2, 0), (HEADROOM_BYTES * 2, 1)):
        command = [sys.executable, "-c", code.format(HEADROOM_BYTES, size)]
        run = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=ROOT)
        assert run.returncode == status and ("MemoryError" in run.stderr) == bool(status)
