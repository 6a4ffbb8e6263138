"""Steps that workers write down, what probes and overlaps are told of them, and a real pair and real replicas for a moment."""

from __future__ import annotations

import asyncio
import io
from array import array
from pathlib import Path
from types import SimpleNamespace

import pytest

from octavo.backends.base import KVCapacity
from octavo.bench import cluster_ways
from octavo.bench.cluster_ways import (
    Delivered,
    Overlap,
    Probe,
    RunningWay,
    SceneRounds,
    Way,
    WayRun,
    deliveries,
    deliveries_of,
    overlaps,
    probe_of,
    probes,
    running_ways,
)
from octavo.bench.logged_worker import LoggedEngine, LoggedStep, StepFile, WrittenLog, step_file, touch_kv
from octavo.bench.stream_record import StreamRecord
from octavo.core.cost import StepShape
from octavo.core.kv_pages import PageLayout
from octavo.core.request import SamplingParams
from octavo.distributed.link import Link
from octavo.distributed.messages import Load
from octavo.distributed.told_load import Told
from octavo.engine.llm import make_config
from octavo.workload.requests import WorkloadRequest
from tests.engine.scripted import Bigram, bigram_config, bigram_model, byte_tokenizer
from tests.models.tiny import write_tiny_gguf

SETTINGS = {"num_kv_blocks": 200, "max_num_seqs": 4, "max_num_batched_tokens": 64, "threads": 1}


def step(begin_s: float, total_s: float, num_rows: int = 1) -> LoggedStep:
    shape = StepShape()
    shape.add(0, num_rows, 1)
    return LoggedStep(begin_s, shape, "decode", total_s / 2, total_s, False)


# --- the log ----------------------------------------------------------------------------------------------------------------------------


class Ticking:
    """A clock that goes on by 1 s whenever it is read."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def now(self) -> float:
        self.now_s += 1.0
        return self.now_s


def logged(tmp_path: Path) -> tuple[LoggedEngine, Ticking, StepFile]:
    tokenizer, clock, path = byte_tokenizer(), Ticking(), step_file(tmp_path, "w")
    engine = LoggedEngine(bigram_model(tokenizer), bigram_config(), Bigram(tokenizer.vocab_size), clock)
    engine.step_log = WrittenLog(open(path, "a", encoding="ascii"), 100.0)  # noqa: SIM115
    return engine, clock, StepFile(path)


def add(engine: LoggedEngine, name: str, num_prompt: int, num_output: int) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=num_output, ignore_eos=True)
    engine.add(engine.prepare([5] * num_prompt, params, name))


def test_steps_are_written_when_the_engine_rests(tmp_path: Path) -> None:
    engine, _, file = logged(tmp_path)
    add(engine, "a", 7, 3)
    engine.step()
    engine.step()
    assert file.take() == []
    engine.step()
    steps = file.take()
    assert [(one.shape.num_rows, one.kind) for one in steps] == [(7, "prefill"), (1, "decode"), (1, "decode")]
    assert [one.follows_idleness for one in steps] == [True, False, False]
    assert [one.end_s for one in steps[:2]] == [one.begin_s for one in steps[1:]] and steps[0].begin_s > 100.0
    assert file.take() == [] and not engine.has_work
    add(engine, "b", 2, 1)
    engine.step()
    assert [one.shape.num_rows for one in file.take()] == [2]


def test_idleness_after_a_hand_off_is_in_no_step(tmp_path: Path) -> None:
    """When its step ended there was work; then the sequence was handed over, and nothing came for a long time."""
    engine, clock, file = logged(tmp_path)
    add(engine, "a", 7, 9)
    engine.step()
    engine.loop.offer("a")
    engine.step()  # as the thread does when it is woken
    clock.now_s += 5000.0
    add(engine, "b", 3, 1)
    engine.step()
    steps = file.take()
    assert [(one.shape.num_rows, one.follows_idleness) for one in steps] == [(7, True), (3, True)]
    assert all(one.total_s < 100.0 for one in steps)


def test_a_line_that_is_being_written_is_read_later(tmp_path: Path) -> None:
    path = tmp_path / "w.steps"
    file, lines = StepFile(path), [step(1.0, 0.5, 3).to_json() + "\n", step(2.0, 0.25).to_json() + "\n"]
    assert file.take() == []
    path.write_text(lines[0] + lines[1][:9])
    assert file.take() == [step(1.0, 0.5, 3)]
    path.write_text("".join(lines))
    assert file.take() == [step(2.0, 0.25)] and file.take() == []


def test_a_log_without_steps_writes_nothing() -> None:
    text = io.StringIO()
    WrittenLog(text, 0.0).rest()
    assert not text.getvalue()


class Pool(Bigram):
    """Remembers which layers of which pages were written. Two columns: layer 1 is the second one's."""

    num_kv_layers = 3
    layout = PageLayout(64, 1, 1, 8, ((0, 0), (1, 0), (0, 32)))

    def __init__(self, vocab_size: int) -> None:
        super().__init__(vocab_size)
        self.written: list[tuple[int, int]] = []

    def kv_capacity(self, memory_bytes: int) -> KVCapacity:
        return KVCapacity(128, 0, "f32", self.layout)

    def wire_layer_bytes(self, layer: int, packed: bool = False) -> int:
        return 32 + layer

    def export_kv(self, layers: range, pages: array[int], to: bytearray, packed: bool = False) -> None:
        raise AssertionError("nothing is read")

    def import_kv(self, layers: range, pages: array[int], data: bytearray, packed: bool = False) -> None:
        (layer,) = layers
        assert len(pages) == 2 and len(data) == 32 + layer
        self.written.append((layer, pages[self.layout.layers[layer][0]]))


def test_the_pool_has_been_written_once() -> None:
    tokenizer = byte_tokenizer()
    pool = Pool(tokenizer.vocab_size)
    engine = LoggedEngine(bigram_model(tokenizer), bigram_config(), Bigram(tokenizer.vocab_size))
    touch_kv(engine)  # a backend that keeps its KV to itself
    engine.backend = pool
    touch_kv(engine)
    assert sorted(pool.written) == [(layer, page) for layer in range(3) for page in range(2 * engine.num_kv_blocks)]


# --- what is told of steps --------------------------------------------------------------------------------------------------------------


def test_overlaps_by_hand() -> None:
    steps = {"a": [step(0.0, 2.0), step(2.0, 2.0), step(10.0, 1.0)], "b": [step(1.0, 2.0), step(3.5, 0.25, 9), step(3.75, 4.0)]}
    found = {one.begin_s: overlap for one, overlap in overlaps(steps)}
    assert list(found) == [0.0, 2.0, 10.0, 1.0, 3.5, 3.75]
    assert [one.decode for one in found.values()] == pytest.approx([0.5, 0.5 + 0.125, 0.0, 1.0, 1.0, 0.0625])
    assert [one.prompt for one in found.values()] == pytest.approx([0.0, 0.125, 0.0, 0.0, 0.0, 0.0])
    assert [share for _, share in overlaps({"a": steps["a"]})] == [Overlap()] * 3
    three = overlaps({"a": [step(0.0, 1.0)], "b": [step(0.0, 1.0, 5)], "c": [step(0.5, 1.0)]})
    assert [share for _, share in three] == [Overlap(0.5, 1.0), Overlap(1.5, 0.0), Overlap(0.5, 0.5)]


def run_of(steps: dict[str, list[LoggedStep]], times: list[float]) -> WayRun:
    return WayRun([StreamRecord(40, 3, sent_s=9.0, event_times=array("d", times))], steps)


def test_probes_by_hand() -> None:
    apart = {"prefill-0": [step(9.1, 0.4, 40)], "decode-0": [step(9.7, 0.1), step(9.8, 0.1)]}
    probe = probe_of(run_of(apart, [9.55, 9.85, 9.95]), 40, 4000)
    assert probe is not None
    assert probe == pytest.approx(Probe(40, 0.1, 0.05, 0.2, 4000))
    stays = {"worker-0": [], "worker-1": [step(9.1, 0.4, 40), step(9.5, 0.1), step(9.6, 0.1)]}
    probe = probe_of(run_of(stays, [9.55, 9.65, 9.75]), 40, 4000)
    assert probe is not None and probe.handoff_s is None
    in_chunks = {"worker-0": [step(9.1, 0.2, 20), step(9.3, 0.2, 20), step(9.5, 0.1)]}
    assert probe_of(run_of(in_chunks, [9.55, 9.65, 9.75]), 40, 4000) is None
    assert probe_of(run_of({"worker-0": []}, [9.55, 9.65, 9.75]), 40, 4000) is None  # its steps were not written in time


def shapes_of(found: list[Delivered]) -> list[str]:
    return ["" if one.beside is None else "decodes" if one.beside.only_decodes else "prompt" for one in found]


def test_deliveries_by_hand() -> None:
    """Two streams on two workers, each with its own number of tokens: every token but the first is some step's."""
    one = [step(1.0, 0.5, 24), step(1.5, 0.1), step(1.6, 0.1)]
    two = [step(1.1, 0.45, 40), step(1.55, 0.1)]
    records = [StreamRecord(24, 3, event_times=array("d", [1.52, 1.63, 1.69])), StreamRecord(40, 2, event_times=array("d", [1.6, 1.7]))]
    found = deliveries_of(WayRun(records, {"a": one, "b": two}))
    assert [one.delay_s for one in found] == pytest.approx([0.03, -0.01, 0.05])
    assert shapes_of(found) == ["decodes", "", "decodes"]
    beside_a_prompt = deliveries_of(WayRun(records[:1], {"decode-0": one[1:], "prefill-0": [step(1.0, 0.5, 24), step(1.55, 9.0, 300)]}))
    assert shapes_of(beside_a_prompt) == ["prompt"] * 2


def test_streams_that_cannot_be_told_apart_say_nothing() -> None:
    one = [step(1.0, 0.5, 24), step(1.5, 0.1), step(1.6, 0.1)]
    records = [StreamRecord(24, 3, event_times=array("d", [1.52, 1.63, 1.69]))] * 2
    assert deliveries_of(WayRun(records, {"a": one, "b": one})) == []
    assert deliveries_of(WayRun(records[:1], {"a": [*one, step(1.7, 0.1)]})) == []  # a step more than it has tokens
    together = StepShape(2, 2, 2, 50, 50)
    assert deliveries_of(WayRun(records[:1], {"a": [one[0], one[1], one[2]._replace(shape=together)]})) == []
    assert deliveries_of(WayRun([StreamRecord(24, 3)], {"a": []})) == []


def test_steps_are_taken_when_all_workers_have_told_that_they_are_idle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However long that takes them on a busy machine: they write their steps before."""
    monkeypatch.setattr(cluster_ways, "_REST_S", 0.001)
    links = [Link(SimpleNamespace(), SimpleNamespace()) for _ in range(2)]  # type: ignore[arg-type]
    links[0].load = Load(num_offered=1)
    links[1].view.sent(20)

    async def measure() -> None:
        running = RunningWay(Way("both", {"both": 2}, bigram_config()), SimpleNamespace(control=links), tmp_path)  # type: ignore[arg-type]
        taking = asyncio.create_task(running.rested())
        for link, name in zip(links, ("worker-0", "worker-1"), strict=True):
            await asyncio.sleep(0.05)
            assert not taking.done()
            step_file(tmp_path, name).write_text(step(1.0, 0.5).to_json() + "\n")
            link.load = Load()
            link.view.told(Told(num_received=link.view.num_unseen))
        assert {name: len(steps) for name, steps in (await taking).items()} == {"worker-0": 1, "worker-1": 1}

    asyncio.run(measure())


# --- real workers -----------------------------------------------------------------------------------------------------------------------


def test_real_workers_and_their_steps(tmp_path: Path) -> None:
    """A pair and two replicas: every row that was computed is in a step that its worker wrote."""
    model = str(write_tiny_gguf(tmp_path / "m.gguf", context=512))
    config = make_config(model, **SETTINGS)
    ways = [Way("apart", {"prefill": 1, "decode": 1}, config), Way("both", {"both": 2}, config)]
    requests = [WorkloadRequest(0.0, [5 + i] * 20, 4) for i in range(4)]

    async def measure() -> None:
        async with running_ways(ways, model) as running:
            for one in running:
                run = await one.run(requests)
                assert [record.error_kind for record in run.records] == [None] * 4
                rows = {name: sum(step.shape.num_rows for step in steps) for name, steps in run.steps.items()}
                assert sum(rows.values()) == 4 * (20 + 3)
                assert not one.way.is_apart or rows == {"prefill-0": 80, "decode-0": 12}
            pair, replicas = running
            some = await probes(pair, 2, (16, 48, 500))  # the last is longer than a step
            assert some and {probe.num_prompt for probe in some} <= {16, 48}
            assert all(probe.handoff_s is not None and probe.num_bytes > 0 for probe in some)
            assert all(probe.handoff_s is None for probe in await probes(replicas, 1, (16,)))
            for one in running:
                delivered = await deliveries(one, 1)
                assert len(delivered) <= 31 + 31 + 27 + 39 and all(abs(some.delay_s) < 60.0 for some in delivered)
            rounds = SceneRounds(running)
            await rounds.run(0.0, min_steps=1)
            assert rounds.num_rounds >= 1 and all(0.0 <= sum(overlap) <= 1.0 + 1e-9 for _, overlap in rounds.steps)

    asyncio.run(measure())
