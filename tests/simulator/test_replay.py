"""What a real engine was told, told again to the simulator's scheduler, makes the same plans in the same order."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from octavo.config import BackendConfig, CacheConfig, EngineConfig, ModelConfig, SchedulerConfig, SpeculativeConfig
from octavo.core.cost import StepShape
from octavo.core.recording import RecordingError
from octavo.core.request import BeamParams, SamplingParams
from octavo.costs.fitting import FitError
from octavo.engine.engine import Engine
from octavo.simulator.replay import Replay, replay_recording
from tests.models.tiny import write_tiny_gguf

SETTINGS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "chunks, hits and preemption": ({}, {}, {}),
    "by token": ({"prefix_granularity": "token"}, {}, {}),
    "bounded gaps": ({}, {"max_itl_ms": 2.0}, {}),
    "swapping": ({"swap_space": 1 << 22}, {}, {}),
    "priority, drafts": ({}, {"scheduling_policy": "priority"}, {"spec": 2}),
    "fair, whole prompts": ({}, {"scheduling_policy": "fair", "enable_chunked_prefill": False}, {}),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_gguf(tmp_path_factory.mktemp("models") / "rand.gguf", context=256)


def requests(rng: random.Random) -> list[tuple[list[int], SamplingParams, dict[str, Any]]]:
    """Prompts that share beginnings, answers that outgrow the pool, and every kind of request that changes plans."""
    stem = [rng.randrange(3, 500) for _ in range(100)]
    jobs: list[tuple[list[int], SamplingParams, dict[str, Any]]] = []
    for i in range(36):
        prompt = stem[: rng.choice((0, 16, 40, 80))] + [rng.randrange(3, 500) for _ in range(rng.randint(1, 40))]
        kind = i % 9
        params = SamplingParams(
            max_tokens=rng.randint(10, 80),
            ignore_eos=kind != 1,
            seed=i,
            n=2 if kind == 2 else 1,
            logprobs=2 if kind == 3 else None,
            prompt_logprobs=1 if kind == 4 else None,
            stop=("e", "t") if kind == 5 else (),
            beam=BeamParams(2) if kind == 6 else None,
            logit_bias={5: 1.5} if kind == 7 else {},
            bad_words_token_ids=((7, 8),) if kind == 7 else (),
        )
        jobs.append((prompt, params, {"priority": i % 3, "user": f"u{i % 2}", "cache_salt": "s" if kind == 8 else None}))
    return jobs


def recorded_run(model: Path, file: Path, settings: tuple[dict[str, Any], dict[str, Any], dict[str, Any]]) -> Engine:
    """A run of the real engine in a small pool: requests come in between steps, some leave."""
    cache, scheduler, speculative = settings
    config = EngineConfig(
        ModelConfig(str(model)),
        CacheConfig(num_kv_blocks=16, **cache),
        SchedulerConfig(**{"max_num_seqs": 8, "max_num_batched_tokens": 32, "admission_lookahead": 1, "record": str(file), **scheduler}),
        BackendConfig(threads=1),
        SpeculativeConfig(**speculative),
    )
    engine, rng = Engine.load(config), random.Random(1)
    jobs, live = requests(rng), list[str]()
    try:
        while jobs or engine.has_work:
            while jobs and rng.random() < 0.6:
                prompt, params, options = jobs.pop()
                if config.scheduler.scheduling_policy != "priority":
                    options["priority"] = 0
                prepared = engine.prepare(prompt, params, **options)
                goes_on = params.n == 1 and params.beam is None and not params.stop and params.seed in (3, 9, 12)
                engine.add(prepared, [9, 11, 12] if goes_on else [])
                live.append(prepared.request.request_id)
            if live and rng.random() < 0.03:
                engine.abort(rng.choice(live))
            engine.step()
    finally:
        engine.close()
    assert engine.metrics.num_failed_steps == 0
    return engine


@pytest.mark.parametrize("name", SETTINGS)
def test_a_recorded_run_of_the_real_engine_makes_the_same_plans(model: Path, tmp_path: Path, name: str) -> None:
    engine = recorded_run(model, tmp_path / "run.jsonl", SETTINGS[name])
    shapes = list[tuple[int, int]]()
    replay = replay_recording(tmp_path / "run.jsonl", lambda plan, result: shapes.append((len(plan.slices), len(result.slices))))
    stats = engine.scheduler.stats
    assert replay.num_plans == stats.num_steps == len(shapes) > 100
    assert all(planned == drawn for planned, drawn in shapes)
    assert replay.num_preemptions == stats.num_preemptions
    assert stats.num_preemptions > 0 or name == "bounded gaps"  # these depend on the clock
    assert replay.prefix_hit_tokens == stats.prefix_hit_tokens > 0
    assert replay.num_aborts > 0
    assert replay.device_s > 0.0 and replay.coefficients().max_rows >= 32
    assert [work.arrival_s for work in replay.requests] == sorted(work.arrival_s for work in replay.requests)
    assert len(replay.requests) > 15


@pytest.fixture(scope="module")
def recording(model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    file = tmp_path_factory.mktemp("recordings") / "run.jsonl"
    recorded_run(model, file, SETTINGS["chunks, hits and preemption"])
    return file.read_text().splitlines(keepends=True)


def replayed(lines: list[str], folder: Path) -> Replay:
    file = folder / "lines.jsonl"
    file.write_text("".join(lines))
    return replay_recording(file)


def changed(recording: list[str], kind: str, nth: int, index: int, value: object) -> list[str]:
    """The recording with one cell of the nth line of a kind changed."""
    places = [i for i, line in enumerate(recording) if line.startswith(f'["{kind}"')]
    lines = list(recording)
    cells = json.loads(lines[places[nth]])
    cells[index] = value(cells[index]) if callable(value) else value
    lines[places[nth]] = json.dumps(cells) + "\n"
    return lines


def test_a_replay_says_where_it_leaves_the_run(recording: list[str], tmp_path: Path) -> None:
    step = json.loads([line for line in recording if line.startswith('["plan"')][40])[1]
    with pytest.raises(RecordingError, match=f"step {step}: the plan is another than the recorded one"):
        replayed(changed(recording, "plan", 40, 3, "0" * 16), tmp_path)

    def longer(request: dict[str, Any]) -> dict[str, Any]:
        return {**request, "prompt_token_ids": [*request["prompt_token_ids"], 3]}

    with pytest.raises(RecordingError, match="the plan is another"):
        replayed(changed(recording, "add", 3, 2, longer), tmp_path)


def test_without_a_line_it_is_another_run(recording: list[str], tmp_path: Path) -> None:
    abort = next(i for i, line in enumerate(recording) if line.startswith('["abort"'))
    live = {json.loads(line)[2]["request_id"] for line in recording[:abort] if line.startswith('["add"')}
    assert json.loads(recording[abort])[2] in live
    result = next(i for i, line in enumerate(recording) if line.startswith('["result"'))
    with pytest.raises(RecordingError, match=f"line {result + 1 + 1}|line {result + 1}"):
        replayed(recording[:result] + recording[result + 1 :], tmp_path)


def test_a_recording_that_a_crash_cut_off_is_replayed_up_to_there(recording: list[str], tmp_path: Path) -> None:
    whole = replayed(recording, tmp_path)
    cut = replayed([*recording[:100], recording[100][:-5]], tmp_path)
    assert 0 < cut.num_plans < whole.num_plans


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], "the file is empty"),
        (["{}\n"], 'line 1: "format": "octavo-recording"'),
        (["nonsense\n"], "line 1: it is no JSON"),
        (['{"format":"octavo-recording","version":1}\n'], "line 1: KeyError"),
    ],
)
def test_what_is_no_recording_is_refused(lines: list[str], message: str, tmp_path: Path) -> None:
    with pytest.raises(RecordingError, match=message):
        replayed(lines, tmp_path)


def test_odd_lines_are_refused(recording: list[str], tmp_path: Path) -> None:
    result = '["result",0,0.1,0.0,[],[]]\n'
    odd = (
        ('["other",0,1]\n', "is no kind of line"), ("[]\n", "line 2"), (result, "without a plan"), ('["add",0]\n', "line 2: IndexError"),
        ('["add",0,[]]\n', "line 2: TypeError"), ("7\n", "line 2: TypeError"), ('["abort",0,"\udcff"]\n', "line 3"),
    )  # fmt: skip
    for line, message in odd[:-1]:
        with pytest.raises(RecordingError, match=message):
            replayed([recording[0], line], tmp_path)


@pytest.mark.parametrize("seconds", [float("nan"), -5.0, 1e300, float("inf"), "long", True, None])
@pytest.mark.parametrize("index", [2, 3])
def test_seconds_that_are_none_are_refused(recording: list[str], tmp_path: Path, seconds: object, index: int) -> None:
    place = [i for i, line in enumerate(recording) if line.startswith('["result"')][7]
    with pytest.raises(RecordingError, match=f"line {place + 1}: (.*seconds: .* is not allowed; a number from 0 to|TypeError)"):
        replayed(changed(recording, "result", 7, index, seconds), tmp_path)


@pytest.mark.parametrize("now", [float("nan"), -5.0, 1e300, 0.0])
def test_moments_that_are_none_are_refused(recording: list[str], tmp_path: Path, now: float) -> None:
    with pytest.raises(RecordingError, match="time of the plan: .* is not allowed|is planned at 0.0 s, before the one above it"):
        replayed(changed(recording, "plan", 40, 2, now), tmp_path)
    if now not in (0.0, -5.0):
        with pytest.raises(RecordingError, match="arrival_s: .* is not allowed"):
            replayed(changed(recording, "add", 3, 2, lambda request: {**request, "arrival_s": now}), tmp_path)


def test_requests_that_are_left_out_are_counted(recording: list[str], tmp_path: Path) -> None:
    for num_lines in (len(recording), len(recording) // 2, 20, 1):
        replay = replayed(recording[:num_lines], tmp_path)
        assert len(replay.requests) + replay.num_left_out == sum(line.startswith('["add"') for line in recording[:num_lines])


def noisy(recording: list[str], shapes: list[StepShape], seed: int) -> list[str]:
    """The recording with the times of a device of known law, on a machine that is busy: a step takes up to twice as long as it should."""
    rng, now, lines, place = random.Random(seed), 0.0, [recording[0]], iter(shapes)
    for line in recording[1:]:
        cells = json.loads(line)
        if cells[0] == "plan":
            cells[2] = now
        elif cells[0] == "result":
            shape = next(place)
            device_s = (5e-3 + 1e-4 * shape.num_rows + 1e-6 * shape.num_context) * rng.choice((1.0, 1.0, 1.1, 1.5, 2.0))
            cells[2:4] = [device_s, 0.0]
            now += device_s + 1e-3
        elif cells[0] == "add":
            cells[2]["arrival_s"] = min(now, 3.0)
        lines.append(json.dumps(cells) + "\n")
    return lines


def test_the_prices_make_up_what_the_steps_took(recording: list[str], tmp_path: Path) -> None:
    """On a busy machine as well, what is done beside the device included; and so the same load takes the same, recorded twice."""
    shapes = list[StepShape]()
    (tmp_path / "run.jsonl").write_text("".join(recording))
    replay_recording(tmp_path / "run.jsonl", lambda plan, _: shapes.append(StepShape.of(plan)))
    fitted = []
    for seed in range(2):
        replay = replayed(noisy(recording, shapes, seed), tmp_path)
        cost, took_s = replay.coefficients(), sum(sample[-1] for sample in replay.samples)
        assert len(replay.samples) == replay.num_plans == len(shapes)
        assert replay.device_s < took_s <= replay.device_s + 1e-3 * len(shapes) + 1e-9
        assert sum(map(cost.seconds_of, shapes)) == pytest.approx(took_s, rel=1e-6)
        fitted.append(cost)
    one, other = (sum(map(cost.seconds_of, shapes)) for cost in fitted)
    assert one == pytest.approx(other, rel=0.05)


def test_too_few_steps_make_no_prices(recording: list[str], tmp_path: Path) -> None:
    with pytest.raises(FitError, match="are not enough"):
        replayed(recording[:1], tmp_path).coefficients()
