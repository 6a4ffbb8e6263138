"""What the cpu backend must refuse, and outlive: plans that cannot be, unknown kernel paths, forks, a second close, too little memory.

A refusal is a Python error that names what is wrong; the backend then computes the same as before.
"""

from __future__ import annotations

import os
import subprocess
import sys
from array import array
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from octavo.backends.base import BackendError, OutOfResources  # noqa: F401 - the scripts'
from octavo.backends.cpu.backend import CpuBackend
from octavo.config import BackendConfig, EngineConfig
from octavo.core.request import SamplingParams
from octavo.core.step import BlockCopy, SequenceSlice, SlotOpen, StepPlan
from octavo.models.loaded import LoadedModel
from tests.backends.cpu_runs import cpu_logits, make_cpu
from tests.backends.exactness import fixture_model
from tests.conftest import isa_levels

ROOT = Path(__file__).parents[2]
VOCAB = 272  # of the parity fixtures
NUM_BLOCKS = 8
NUM_SLOTS = 64 + 64
GREEDY = SamplingParams(temperature=0.0)
IDS = list(range(3, 40))
MANY = 2**40
GOOD = SequenceSlice(0, 0, [5, 6, 7], array("i", [0, 1]), 1, [0])


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return fixture_model("llama")


@pytest.fixture
def backend(model: LoadedModel) -> Iterator[CpuBackend]:
    made = make_cpu(model, "fast", threads=2, num_blocks=NUM_BLOCKS)
    yield made
    made.close()


def opened(slot: int) -> SlotOpen:
    return SlotOpen(slot, GREEDY, 1, [1, 2], [])


def good(**change: Any) -> StepPlan:
    return StepPlan(0, [replace(GOOD, **change)])


BAD_PLANS: dict[str, tuple[Callable[[], StepPlan], str]] = {
    "block past the pool": (lambda: good(block_table=array("i", [NUM_BLOCKS])), f"block {NUM_BLOCKS} is not in the pool"),
    "negative block": (lambda: good(block_table=array("i", [-1])), "block -1 is not in the pool"),
    "empty table": (lambda: good(block_table=array("i")), "table too short"),
    "table too short": (lambda: good(start=14, block_table=array("i", [0])), "table too short"),
    "table far too short": (lambda: good(start=2**31 - 4), "position past the rotary tables"),
    "table short by one row": (lambda: good(start=30, block_table=array("i", [0, 1])), "table too short"),
    "negative start": (lambda: good(start=-1), "starts at 0"),
    "start past 32 bits": (lambda: good(start=MANY), "32 bits"),
    "token past the vocabulary": (lambda: good(token_ids=[5, VOCAB, 7]), f"token id {VOCAB} is not in 0 .. {VOCAB - 1}"),
    "negative token": (lambda: good(token_ids=[-1]), "token id -1 "),
    "token past 32 bits": (lambda: good(token_ids=[MANY]), "32 bits"),
    "no tokens": (lambda: good(token_ids=[]), "at least one row"),
    "slot not open": (lambda: good(sample_slots=[1]), "slot: 1 is not open"),
    "slot out of range": (lambda: good(sample_slots=[10**6]), "slot: 1000000 is not open"),
    "slot past 32 bits": (lambda: good(sample_slots=[MANY]), "32 bits"),
    "one slot for two samples": (lambda: good(num_samples=2, sample_slots=[0, 0]), "slot: 0 draws twice"),
    "one slot for two sequences": (lambda: StepPlan(0, [GOOD, replace(GOOD, block_table=array("i", [2]))]), "slot: 0 draws twice"),
    "fewer slots than samples": (lambda: good(num_samples=2), "2 samples and 1 slots"),
    "slots without samples": (lambda: good(num_samples=0), "0 samples and 1 slots"),
    "more next tokens than rows": (lambda: good(prompt_logprobs=1, next_token_ids=[1, 2, 3, 4]), "4 next tokens and 3 rows"),
    "next token past the vocabulary": (lambda: good(prompt_logprobs=1, next_token_ids=[VOCAB]), f"token id {VOCAB} is not in"),
    "negative next token": (lambda: good(prompt_logprobs=1, next_token_ids=[-5]), "token id -5 is not in"),
    "mask too short": (lambda: good(mask=array("I", [1])), "1 mask words; a vocabulary of 272 needs 9"),
    "mask too long": (lambda: good(mask=array("I", [1] * 10)), "10 mask words"),
    "too many logprobs": (lambda: good(logprobs=21), "logprobs is 21; from 0 to 20"),
    "negative logprobs": (lambda: good(logprobs=-2), "logprobs is -2"),
    "too many prompt logprobs": (lambda: good(prompt_logprobs=21, next_token_ids=[1]), "prompt_logprobs is 21"),
    "drafts without samples for them": (lambda: good(num_drafts=1), "1 drafts among 3 tokens need 2 samples, not 1"),
    "nothing but drafts": (lambda: good(num_drafts=3, num_samples=4), "3 drafts among 3 tokens"),
    "drafts and several slots": (lambda: good(num_drafts=1, num_samples=2, sample_slots=[0, 1]), "2 samples and 2 slots"),
    "drafts of a prompt that is scored": (
        lambda: good(num_drafts=1, num_samples=2, prompt_logprobs=1, next_token_ids=[1, 2]), "1 drafts among 3 tokens",
    ),
    "copy from outside": (lambda: StepPlan(0, [GOOD], [BlockCopy(NUM_BLOCKS, 0)]), f"copy of page {NUM_BLOCKS} to page 0"),
    "copy to outside": (lambda: StepPlan(0, [GOOD], [BlockCopy(0, -1)]), "copy of page 0 to page -1"),
    "slot opened twice": (lambda: StepPlan(0, [GOOD], slot_opens=[opened(0)]), "slot: 0 is already open"),
    "opened slot out of range": (lambda: StepPlan(0, [GOOD], slot_opens=[opened(NUM_SLOTS)]), f"slot: {NUM_SLOTS} is not in"),
    "fork of a closed slot": (lambda: StepPlan(0, [GOOD], slot_forks=[(5, 6, 1)]), "slot: 5 is not open"),
    "fork to an open slot": (lambda: StepPlan(0, [GOOD], slot_forks=[(0, 0, 1)]), "slot: 0 is already open"),
    "token of the slot past the vocabulary": (
        lambda: StepPlan(0, [GOOD], slot_opens=[replace(opened(1), output_token_ids=[VOCAB])]), f"output_token_ids: token id {VOCAB}",
    ),
    "temperature of the slot": (
        lambda: StepPlan(0, [GOOD], slot_opens=[replace(opened(1), params=SamplingParams(temperature=float("nan")))]), "temperature: nan",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_PLANS)
def test_a_plan_that_cannot_be_is_refused_and_changes_nothing(backend: CpuBackend, name: str) -> None:
    before = cpu_logits(backend, IDS, [4, 5, 6])
    backend.execute(StepPlan(0, slot_opens=[opened(0)]))
    make_plan, message = BAD_PLANS[name]
    with pytest.raises(ValueError, match=message):
        backend.execute(make_plan())
    assert len(backend.execute(StepPlan(1, [GOOD])).slices[0].token_ids) == 1
    assert cpu_logits(backend, IDS[-1:], [4, 5, 6], start=len(IDS) - 1).tobytes() == before[-1:].tobytes()


def test_slots_of_a_refused_plan_are_closed_all_the_same(backend: CpuBackend) -> None:
    """The scheduler has given them back, and may give them out again."""
    backend.execute(StepPlan(0, slot_opens=[opened(0)]))
    with pytest.raises(ValueError, match="token id"):
        backend.execute(StepPlan(1, [replace(GOOD, token_ids=[VOCAB], sample_slots=[1])], slot_closes=[0], slot_opens=[opened(1)]))
    plan = StepPlan(2, [GOOD], slot_closes=[1], slot_opens=[opened(0)])
    assert len(backend.execute(plan).slices[0].token_ids) == 1


# --- life ---------------------------------------------------------------------------------------------------------------------------------


def threads() -> set[str]:
    """Of this process. Those of others may end at any time."""
    return set(os.listdir("/proc/self/task"))


def test_before_the_pool_and_after_the_end(model: LoadedModel) -> None:
    before = threads()
    backend = CpuBackend(model, EngineConfig(backend=BackendConfig(threads=3)))
    assert len(threads() - before) == 2
    with pytest.raises(BackendError, match="allocate_kv comes before execute"):
        backend.execute(StepPlan(0, [GOOD]))
    for num_blocks in (0, -1, 2**31, MANY):
        with pytest.raises(BackendError, match=f"num_kv_blocks: {num_blocks} "):
            backend.allocate_kv(num_blocks)
    backend.allocate_kv(4)
    with pytest.raises(BackendError, match="already allocated"):
        backend.allocate_kv(4)
    for _ in range(2):
        backend.close()
        assert threads() <= before
    for use in (lambda: backend.execute(StepPlan(0)), lambda: backend.allocate_kv(4), lambda: backend.kv_capacity(1 << 20)):
        with pytest.raises(BackendError, match="the cpu backend is closed"):
            use()


def test_two_backends_in_one_process(model: LoadedModel) -> None:
    other = fixture_model("qwen3")
    alone = [cpu_logits(make_cpu(m, "fast", threads=1), IDS, [0, 1, 2]) for m in (model, other)]
    first, second = make_cpu(model, "fast", threads=2), make_cpu(other, "fast", threads=2)
    for start in range(0, len(IDS), 6):
        for backend, want in ((first, alone[0]), (second, alone[1])):
            ids = IDS[start : start + 6]
            assert cpu_logits(backend, ids, [0, 1, 2], start=start).tobytes() == want[start : start + 6].tobytes()
    first.close()
    assert cpu_logits(second, IDS, [3, 4, 5]).tobytes() == alone[1].tobytes()
    second.close()


def test_a_kernel_path_that_is_not_there_is_named(model: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    for wanted in ("avx1024", "AVX2", " portable"):
        monkeypatch.setenv("OCTAVO_ISA", wanted)
        with pytest.raises(BackendError, match=f"OCTAVO_ISA: '{wanted}' is not available here; this machine has portable"):
            make_cpu(model)
    monkeypatch.setenv("OCTAVO_ISA", "")
    assert make_cpu(model).isa == isa_levels()[-1]


def test_avx512_is_the_better_of_its_two_levels(model: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    levels = [level for level in isa_levels() if level.startswith("avx512")]
    monkeypatch.setenv("OCTAVO_ISA", "avx512")
    if not levels:
        with pytest.raises(BackendError, match="OCTAVO_ISA: 'avx512' is not available here"):
            make_cpu(model)
        return
    backend = make_cpu(model)
    assert backend.isa == levels[-1] and backend.fingerprint().endswith(f":{levels[-1]}")


def test_int8_kv_takes_a_byte_a_value_and_two_scales_a_token_and_head(model: LoadedModel) -> None:
    layers = [(kv.kv_heads, -(-kv.head_dim // 16) * 16, kv.head_dim) for kv in model.program.kv_layers]
    want = sum(-(-16 * heads * (dim + padded + 8) // 64) * 64 for heads, padded, dim in layers)
    assert make_cpu(model, "fast", "int8").kv_capacity(1 << 20).bytes_per_block == want


def test_what_bits_depend_on_is_in_the_fingerprint(model: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    prints = set()
    for level in isa_levels():
        monkeypatch.setenv("OCTAVO_ISA", level)
        for compute, kv_dtype in (("fast", "auto"), ("fast", "f16"), ("fast", "int8"), ("fast", "f32"), ("f32", "auto")):
            prints.add(make_cpu(model, compute, kv_dtype).fingerprint())
    assert len(prints) == 5 * len(isa_levels())
    one, other = make_cpu(model, threads=1), make_cpu(model, threads=2, num_blocks=3, block_size=32)
    assert one.fingerprint() == other.fingerprint() != make_cpu(replace(model, fingerprint="other")).fingerprint()


# --- processes ----------------------------------------------------------------------------------------------------------------------------


def run_script(body: str) -> str:
    """The output of a Python process of its own, which must end by itself and well."""
    head = "import os, sys, resource, signal\nsignal.alarm(60)\nfrom tests.backends.test_cpu_refusals import *\n"
    environment = os.environ | {"PYTHONPATH": f"{ROOT}/src", "OPENBLAS_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", head + body], capture_output=True, text=True, timeout=90, cwd=ROOT, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_forked_child_gets_an_error_and_not_a_wait() -> None:
    """Its copy of the pool has no threads. The parent goes on; a child of a pool of one thread can, too."""
    output = run_script("""
model = fixture_model("llama")
for threads in (2, 1):
    backend = make_cpu(model, "fast", threads=threads)
    before = cpu_logits(backend, IDS, [0, 1, 2]).tobytes()
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        try:
            print(threads, "child:", cpu_logits(backend, IDS, [0, 1, 2]).tobytes() == before, flush=True)
        except RuntimeError as error:
            print(threads, "child:", error, flush=True)
        backend.close()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    print(threads, "parent:", cpu_logits(backend, IDS, [0, 1, 2]).tobytes() == before, flush=True)
    backend.close()
""")
    assert output.splitlines() == [
        "2 child: thread pool used after fork(); load the model in the process that runs it", "2 parent: True",
        "1 child: True", "1 parent: True",
    ]  # fmt: skip


def test_threads_and_memory_that_are_not_to_be_had_are_errors() -> None:
    """Under a limit on address space: a thousand stacks, a pool of gigabytes, and after both refusals a backend that works."""
    output = run_script("""
model = fixture_model("llama")
make_cpu(model, "fast").close()
in_use = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (in_use + (512 << 20),) * 2)
for wanted in (dict(threads=1024), dict(num_blocks=2**31 - 1)):
    try:
        make_cpu(model, "fast", **wanted)
    except OutOfResources as error:  # which may pass
        print(error)
print(cpu_logits(make_cpu(model, "fast", threads=2), IDS, [0, 1, 2]).shape)
""")
    threads, blocks, shape = output.splitlines()
    assert threads.startswith("threads: 1024 cannot be started") and blocks.startswith("num_kv_blocks: 2147483647 blocks")
    assert shape == f"({len(IDS)}, {VOCAB})"


@pytest.mark.model
def test_a_loaded_model_takes_its_size_in_memory_once(smollm2_path: Path) -> None:
    """Resident memory, and its peak, beside the packed weights: neither the file's pages nor a second copy."""
    output = run_script(f"""
from octavo.models.loading import load_model
def resident():
    fields = dict(line.split(":") for line in open("/proc/self/status"))
    return int(fields["VmRSS"].split()[0]) * 1024, int(fields["VmHWM"].split()[0]) * 1024
model = load_model({str(smollm2_path)!r})
opened = resident()[0]
backend = CpuBackend(model, EngineConfig(backend=BackendConfig(threads=2)))
backend.allocate_kv(65536)  # 24 GB of address space
loaded, peak = resident()
cpu_logits(backend, list(range(3, 67)), [0, 1, 2, 65535])
print(opened, loaded, peak, resident()[0], backend.weight_bytes())
""")
    opened_bytes, loaded_bytes, peak_bytes, used_bytes, weight_bytes = map(int, output.split())
    assert 90e6 < weight_bytes < 100e6
    assert loaded_bytes - opened_bytes < 1.1 * weight_bytes + 10e6
    assert peak_bytes - opened_bytes < 1.1 * weight_bytes + 60e6  # beside the largest matrix' pages in the file
    assert used_bytes - loaded_bytes < 60e6  # activations, logits of 64 rows, four blocks
