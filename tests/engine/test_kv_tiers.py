"""Prompts that come back from host memory and disk, through the whole engine on real kernels: the same tokens and, to the bit, the same
log-probabilities as computed; and nothing worse than computing when blocks are damaged, late or missing."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from octavo import LLM, RequestOutput, SamplingParams
from octavo.config import ConfigError
from octavo.engine.async_engine import AsyncEngine
from octavo.engine.causes import Cause
from octavo.engine.engine import Engine
from octavo.engine.kv_disk import list_stores
from octavo.engine.kv_tiering import KVTiering
from tests.models.tiny import write_tiny_gguf

PROMPT = [3 + 7 * i % 400 for i in range(120)]  # 7 full blocks of 16 and 8 tokens
OTHERS = [[5 + (i * k) % 300 for i in range(110)] for k in (11, 13, 17, 19)]
PARAMS = SamplingParams(max_tokens=12, ignore_eos=True, logprobs=3, temperature=0.8, seed=1)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_gguf(tmp_path_factory.mktemp("models") / "rand.gguf", context=1024)


@pytest.fixture(scope="module")
def plain(path: Path) -> RequestOutput:
    with LLM(str(path), num_kv_blocks=64, enable_prefix_caching=False) as llm:
        return llm.generate(PROMPT, PARAMS)[0]


def tiered(path: Path, **options: Any) -> LLM:
    """A pool of ten blocks: each prompt takes the place of the last."""
    return LLM(str(path), **{"num_kv_blocks": 10, "max_num_batched_tokens": 64, **options})


def tiering_of(llm: LLM) -> KVTiering:
    assert llm.engine.tiering is not None
    return llm.engine.tiering


def ask(llm: LLM, plain: RequestOutput, num_cached: int) -> None:
    (output,) = llm.generate(PROMPT, PARAMS)
    assert output.outputs == plain.outputs
    assert output.num_cached_tokens == num_cached
    llm.engine.scheduler.check_invariants()


def restored_always(llm: LLM) -> None:
    """Whatever restoring and computing took here: verdicts are not to depend on the machine's pace."""
    tiering_of(llm).cost.restoring_pays = lambda *_: True  # type: ignore[method-assign]
    tiering_of(llm).cost.recompute_s = lambda *_: 60.0  # type: ignore[method-assign]


@pytest.mark.parametrize("options", [{}, {"backend": "reference"}, {"kv_cache_dtype": "int8"}, {"compute": "f32"}], ids=str)
def test_evicted_to_host_memory_and_back(path: Path, options: dict[str, Any]) -> None:
    with LLM(str(path), num_kv_blocks=64, enable_prefix_caching=False, **options) as llm:
        (expected,) = llm.generate(PROMPT, PARAMS)
    with tiered(path, kv_host_memory=8 << 20, **options) as llm:
        restored_always(llm)
        ask(llm, expected, 0)
        llm.generate(OTHERS[0], PARAMS)
        ask(llm, expected, 112)
        stats = tiering_of(llm).tiers.stats
        assert stats.host_hit_tokens > 0 and stats.disk_hit_tokens == 0 and stats.num_lost_blocks == 0


def test_from_disk_after_a_restart_in_a_new_process(path: Path, plain: RequestOutput, tmp_path: Path) -> None:
    script = f"""
import json
from tests.engine.test_kv_tiers import *
with tiered(Path({str(path)!r}), kv_disk_path={str(tmp_path)!r}) as llm:
    restored_always(llm)
    (output,) = llm.generate(PROMPT, PARAMS)
    choice, stats = output.outputs[0], tiering_of(llm).tiers.stats
    logprobs = [[entry.logprob.hex(), entry.rank, [p.hex() for p in entry.top_logprobs]] for entry in choice.logprobs]
print(json.dumps([choice.token_ids, logprobs, output.num_cached_tokens, stats.disk_hit_tokens]))"""
    runs = [subprocess.run([sys.executable, "-c", script], capture_output=True, check=True).stdout for _ in range(2)]
    first, second = (json.loads(run.splitlines()[-1]) for run in runs)
    assert first[:2] == second[:2] and list(plain.outputs[0].token_ids) == first[0]
    assert first[2:] == [0, 0] and second[2:] == [112, 112]


def test_from_disk_in_the_same_process(path: Path, plain: RequestOutput, tmp_path: Path) -> None:
    """Host memory is so small that what it evicts goes to disk, and comes back from there."""
    with tiered(path, kv_host_memory=12 * 4096, kv_disk_path=str(tmp_path)) as llm:
        restored_always(llm)
        assert tiering_of(llm).tiers.num_host_blocks == 12
        ask(llm, plain, 0)
        for other in OTHERS:
            llm.generate(other, PARAMS)
        ask(llm, plain, 112)
        assert tiering_of(llm).tiers.stats.disk_hit_tokens > 0


def test_everything_is_kept_at_the_end_and_found_again(path: Path, plain: RequestOutput, tmp_path: Path) -> None:
    """Pool, host memory and disk each hold some of it."""
    options = {"kv_host_memory": 8 << 20, "kv_disk_path": str(tmp_path)}
    with tiered(path, **options) as llm:
        ask(llm, plain, 0)
        for other in OTHERS:
            llm.generate(other, PARAMS)
    (store,) = list_stores(tmp_path)
    assert store.about is not None and store.about.model == llm.engine.model.name
    assert store.num_blocks == 8 + 4 * 7  # of prompts and answers
    with tiered(path, **options) as llm:
        restored_always(llm)
        for other in OTHERS:
            assert llm.generate(other, PARAMS)[0].num_cached_tokens == 96
        ask(llm, plain, 112)


def test_damaged_blocks_are_computed_again(path: Path, plain: RequestOutput, tmp_path: Path) -> None:
    with tiered(path, kv_disk_path=str(tmp_path)) as llm:
        ask(llm, plain, 0)
    files = sorted(tmp_path.rglob("*.kv"), key=lambda file: file.stat().st_mtime_ns, reverse=True)  # a parent before its children
    data = bytearray(files[4].read_bytes())
    data[len(data) // 2] ^= 1
    files[4].write_bytes(data)
    with tiered(path, kv_disk_path=str(tmp_path)) as llm:
        restored_always(llm)
        ask(llm, plain, 64)
        assert not files[4].exists()
        assert tiering_of(llm).disk.store.num_damaged == 1  # type: ignore[union-attr]
    with tiered(path, kv_disk_path=str(tmp_path)) as llm:
        restored_always(llm)
        ask(llm, plain, 112)


def test_another_format_finds_nothing(path: Path, plain: RequestOutput, tmp_path: Path) -> None:
    with tiered(path, kv_disk_path=str(tmp_path)) as llm:
        ask(llm, plain, 0)
    for options in ({"kv_cache_dtype": "f32"}, {"compute": "f32"}, {"block_size": 32, "num_kv_blocks": 5}):
        with tiered(path, kv_disk_path=str(tmp_path), **options) as llm:
            assert llm.generate(PROMPT, PARAMS)[0].num_cached_tokens == 0
    assert len(list_stores(tmp_path)) == 4


class _HeldDisk:
    """A store that reads only once it is let go."""

    def __init__(self, tiering: KVTiering) -> None:
        assert tiering.disk is not None
        self.go, store = threading.Event(), tiering.disk.store
        get = store.get
        store.get = lambda ref: get(ref) if self.go.wait(120) else None  # type: ignore[method-assign]


def steps(engine: Engine, num_steps: int) -> list[Any]:
    return [event for _ in range(num_steps) for event in engine.step()]


def test_others_go_on_and_an_abort_is_taken_while_the_disk_reads(path: Path, plain: RequestOutput, tmp_path: Path) -> None:
    with tiered(path, kv_disk_path=str(tmp_path)) as llm:
        ask(llm, plain, 0)
    with tiered(path, num_kv_blocks=40, kv_disk_path=str(tmp_path)) as llm:
        restored_always(llm)
        held, engine = _HeldDisk(tiering_of(llm)), llm.engine
        for name in ("leaves", "stays"):
            engine.add(engine.prepare(PROMPT, PARAMS, name))
        engine.add(engine.prepare(OTHERS[0], PARAMS, "other"))
        events = []
        while not any(event.request_id == "other" and event.finish_reason for event in events):
            events += steps(engine, 1)
        assert {event.request_id for event in events} == {"other"}
        assert [event.request_id for event in engine.abort("leaves")] == ["leaves"]
        assert steps(engine, 3) == []
        held.go.set()
        events = []
        while engine.has_work:
            events += steps(engine, 1)
        engine.scheduler.check_invariants()
        assert [token for event in events for token in event.token_ids] == list(plain.outputs[0].token_ids)
        assert events[-1].num_cached_tokens == 112


def test_a_disk_that_hangs_is_given_up(path: Path, plain: RequestOutput, tmp_path: Path) -> None:
    with tiered(path, kv_disk_path=str(tmp_path)) as llm:
        ask(llm, plain, 0)
    with tiered(path, kv_disk_path=str(tmp_path)) as llm:
        restored_always(llm)
        tiering_of(llm).cost.recompute_s = lambda *_: 0.05  # type: ignore[method-assign]
        held = _HeldDisk(tiering_of(llm))
        ask(llm, plain, 0)
        assert tiering_of(llm).tiers.stats.num_given_up == 1
        held.go.set()


def test_a_failing_step_loses_its_requests_and_no_block(path: Path, plain: RequestOutput) -> None:
    with tiered(path, kv_host_memory=8 << 20) as llm:
        restored_always(llm)
        ask(llm, plain, 0)
        llm.generate(OTHERS[0], PARAMS)
        engine = llm.engine
        execute = engine.backend.execute

        def broken(plan: Any) -> Any:
            raise RuntimeError("the device is gone")

        engine.backend.execute = broken  # type: ignore[method-assign]
        engine.add(engine.prepare(PROMPT, PARAMS))
        assert [event.error for event in engine.step()] != [None]
        engine.backend.execute = execute  # type: ignore[method-assign]
        engine.scheduler.check_invariants()
        ask(llm, plain, 112)


@pytest.mark.parametrize("move", ["before_plan", "wait"])
def test_moves_that_fail_before_a_step_end_its_requests_and_the_loop_goes_on(
    path: Path, plain: RequestOutput, tmp_path: Path, move: str
) -> None:
    with tiered(path, kv_disk_path=str(tmp_path)) as llm:
        ask(llm, plain, 0)

    async def main() -> None:
        llm = tiered(path, kv_disk_path=str(tmp_path))
        restored_always(llm)
        tiering, engine = tiering_of(llm), AsyncEngine(llm.engine)
        held, real = _HeldDisk(tiering), getattr(tiering, move)

        def broken() -> None:
            setattr(tiering, move, real)
            raise OSError("the memory is gone")

        setattr(tiering, move, broken)
        engine.start()
        errors, tokens = [], []
        for events in (errors, tokens):
            stream = engine.submit([llm.engine.prepare(PROMPT, PARAMS)])
            while not stream.finished:
                events += await stream.read()
            held.go.set()
        assert [event.error for event in errors] == ["the step could not be computed: OSError: the memory is gone"]
        assert [token for event in tokens for token in event.token_ids] == list(plain.outputs[0].token_ids)
        assert engine.health().ready and llm.engine.metrics.num_failed_steps == 1
        llm.engine.scheduler.check_invariants()
        await engine.stop()

    asyncio.run(main())


def test_a_block_that_cannot_be_read_on_its_way_to_disk_is_lost_alone(path: Path, plain: RequestOutput, tmp_path: Path) -> None:
    with tiered(path, kv_host_memory=12 * 4096, kv_disk_path=str(tmp_path)) as llm:
        restored_always(llm)
        ask(llm, plain, 0)
        read, failures = llm.engine.backend.read_host_block, iter([MemoryError("no")])

        def reads(host_block: int) -> bytes:
            for error in failures:
                raise error
            return read(host_block)

        llm.engine.backend.read_host_block = reads  # type: ignore[method-assign]
        for other in OTHERS:
            llm.generate(other, PARAMS)
        assert next(failures, None) is None, "a spill has failed"
        (output,) = llm.generate(PROMPT, PARAMS)
        assert output.outputs == plain.outputs
        llm.engine.scheduler.check_invariants()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_host_memory": 1}, "kv_host_memory: 1 bytes hold no block; one takes"),
        ({"kv_host_memory": 0}, "kv_host_memory: 0 is not allowed; at least 1 byte"),
        ({"kv_disk_path": " "}, "kv_disk_path: ' ' is not allowed; a folder is needed"),
        ({"kv_disk_size": 9}, "kv_disk_size: 9 is not allowed; it limits kv_disk_path, which is not set"),
        ({"kv_host_memory": 1 << 20, "enable_prefix_caching": False}, "kv_host_memory: .* enable_prefix_caching is off"),
        ({"kv_disk_path": "x", "enable_prefix_caching": False}, "kv_disk_path: .* enable_prefix_caching is off"),
    ],
)
def test_configurations_that_cannot_be(path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        tiered(path, **options)


def test_what_the_disk_takes_is_explained_of_a_request_alone(path: Path, plain: RequestOutput, tmp_path: Path) -> None:
    with tiered(path, kv_disk_path=str(tmp_path)) as llm:
        ask(llm, plain, 0)
    with tiered(path, kv_disk_path=str(tmp_path)) as llm:
        restored_always(llm)
        held, engine = _HeldDisk(tiering_of(llm)), llm.engine
        engine.add(engine.prepare(PROMPT, PARAMS, "alone"))
        assert steps(engine, 1) == []
        begin_s = engine.clock.now()
        while engine.clock.now() < begin_s + 0.1:
            assert steps(engine, 1) == []
        held.go.set()
        while engine.has_work:
            engine.step()
        record = engine.timeline.find("alone")
    assert record is not None and record.ended_s is not None
    assert record.seconds[Cause.RESTORED] > 0.09
    assert record.ended_s - record.arrival_s - sum(record.seconds) < 0.01 * (record.ended_s - record.arrival_s)
