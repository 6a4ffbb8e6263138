"""Recordings of schedulers that hand requests over: told again they make the same plans, and whatever is missing or changed is found."""

from __future__ import annotations

import contextlib
import io
import json
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from octavo.cli.main import cli
from octavo.config import CacheConfig, SchedulerConfig
from octavo.core.clock import VirtualClock
from octavo.core.cost import StepShape
from octavo.core.recording import RecordingError
from octavo.core.request import ParameterError, Request, SamplingParams
from octavo.core.step import SliceResult, StepPlan, StepResult
from octavo.engine.recording import RecordedScheduler
from octavo.simulator.replay import Replay, replay_recording
from tests.engine.timed import HOST_S, Law, TimedRun

MOVES = ("offer", "release", "resume", "reserve", "begin", "cancel")


class Side:
    """A recorded scheduler on a clock of its own. ``num_gone`` and ``num_come``: requests that were released and begun."""

    def __init__(self, rng: random.Random, policy: str, is_exact: bool) -> None:
        self.file, self.clock = io.StringIO(), VirtualClock()
        self.plan: StepPlan | None = None
        self.num_gone = self.num_come = self.num_plans = 0
        self._is_exact = is_exact
        settings = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=8, admission_lookahead=1, scheduling_policy=policy)
        cache = CacheConfig(block_size=4, enable_prefix_caching=rng.random() < 0.8)
        self.scheduler = RecordedScheduler(self.file, "a test", self.clock, settings, cache, rng.randint(9, 16), 60, "f")

    def begin(self, name: str, tokens: list[int]) -> None:
        self.scheduler.transfers.begin(name, tokens, self._is_exact)
        self.num_come += 1

    def release(self, name: str) -> None:
        self.scheduler.transfers.release(name)
        self.num_gone += 1

    def half_step(self) -> None:
        """Make a plan; or, where there is one, its result: at position p it draws p."""
        self.clock.advance(0.001)
        if self.plan is None:
            self.plan = self.scheduler.plan(self.clock.now())
            self.num_plans += self.plan is not None
            return
        slices = [SliceResult([piece.start + piece.num_tokens] * piece.num_samples) for piece in self.plan.slices]
        self.scheduler.apply(StepResult(self.plan.step_index, slices, 0.001))
        self.plan = None


class Pair:
    """Two sides that hand over both ways, at any moment; now and then one is asked what it refuses, or fails."""

    def __init__(self, seed: int, policy: str) -> None:
        self.rng, self.num_coming = random.Random(seed), 1 + seed // 2 % 2  # in some the pools are always full
        self.sides = [Side(self.rng, policy, is_exact=seed % 2 == 0) for _ in range(2)]
        self.jobs: dict[str, Request] = {}
        self.offered: list[tuple[int, str, list[int]]] = []  # (sender, request, its tokens)
        self.reserved: list[tuple[int, str, list[int]]] = []

    def run(self, num_turns: int) -> None:
        moves = (self.add, self.offer, self.reserve, self.settle, self.odd)
        for turn in range(num_turns):
            place = self.rng.randrange(2)
            side = self.sides[place]
            if self.rng.random() < 0.45:
                self.rng.choices(moves, (self.num_coming, 4, 6, 6, 1))[0](place, f"r{turn}")
            else:
                side.half_step()
            side.scheduler.check_invariants()

    def add(self, place: int, name: str) -> None:
        rng, side = self.rng, self.sides[place]
        params = SamplingParams(max_tokens=rng.randint(6, 20), ignore_eos=True)
        job = Request(name, list(range(rng.randint(1, 20))), params, 5, arrival_s=side.clock.now(), user=rng.choice("uv"))
        with contextlib.suppress(ParameterError):  # longer than its pool
            side.scheduler.add(job, [3] if rng.random() < 0.2 else [])
            self.jobs[name] = job

    def offer(self, place: int, _: str) -> None:
        running = [seq.request.request_id for seq in self.sides[place].scheduler.running_sequences]
        if running:
            name = self.rng.choice(running)
            with contextlib.suppress(ValueError):  # its prompt is not done, or it is in a step
                self.offered.append((place, name, self.sides[place].scheduler.transfers.offer(name)))

    def reserve(self, *_: object) -> None:
        if not self.offered:
            return
        moving = self.offered.pop(self.rng.randrange(len(self.offered)))
        place, name, tokens = moving
        job, to = self.jobs[name], self.sides[1 - place].scheduler.transfers
        with contextlib.suppress(ParameterError):  # longer than its pool
            if self.rng.random() < 0.9 and to.reserve(job, len(job.prompt_token_ids) + len(tokens) - 1) is not None:
                self.reserved.append(moving)
                return
        self.sides[place].scheduler.transfers.resume(name)

    def settle(self, *_: object) -> None:
        if not self.reserved:
            return
        place, name, tokens = self.reserved.pop(self.rng.randrange(len(self.reserved)))
        if self.rng.random() < 0.7:
            self.sides[1 - place].begin(name, tokens)
            self.sides[place].release(name)
        else:
            self.sides[1 - place].scheduler.transfers.cancel(name)
            self.sides[place].scheduler.transfers.resume(name)

    def odd(self, place: int, name: str) -> None:
        scheduler, way = self.sides[place].scheduler, self.rng.randrange(4)
        short = Request(name, [1, 2, 3], SamplingParams(max_tokens=2), 5)
        if way == 0:
            with pytest.raises(ParameterError, match="less than max_tokens"):
                scheduler.add(short, [1, 2])
        elif way == 1:
            with pytest.raises(ParameterError, match="less than max_tokens"):
                scheduler.transfers.reserve(short, 5)
        elif way == 2 and self.jobs:
            scheduler.abort(self.rng.choice([*self.jobs]))
        elif self.rng.random() < 0.2:
            self.fail(place)

    def fail(self, place: int) -> None:
        """What it had offered is lost; what it had reserved is its sender's again."""
        self.sides[place].scheduler.fail_all("broken")
        self.sides[place].plan = None
        for sender, name, _ in [moving for moving in self.reserved if moving[0] != place]:
            self.sides[sender].scheduler.transfers.resume(name)
        for sender, name, _ in [moving for moving in self.reserved if moving[0] == place]:
            self.sides[1 - sender].scheduler.transfers.cancel(name)
        self.offered = [moving for moving in self.offered if moving[0] != place]
        self.reserved = []


def told_again(lines: list[str], folder: Path) -> Replay:
    file = folder / "run.jsonl"
    file.write_text("".join(lines))
    return replay_recording(file)


def lines_of(side: Side) -> list[str]:
    return side.file.getvalue().splitlines(keepends=True)


@pytest.mark.parametrize("policy", ["fcfs", "fair", "srf"])
def test_either_side_makes_the_same_plans_again(policy: str, tmp_path: Path) -> None:
    seen = Counter[str]()
    num_preemptions = num_failures = 0
    for seed in range(8):
        pair = Pair(seed, policy)
        pair.run(700)
        for side in pair.sides:
            lines, stats = lines_of(side), side.scheduler.stats
            replay = told_again(lines, tmp_path)
            assert (replay.num_plans, replay.num_handed_over, replay.num_taken_over) == (side.num_plans, side.num_gone, side.num_come)
            assert (replay.num_preemptions, replay.prefix_hit_tokens) == (stats.num_preemptions, stats.prefix_hit_tokens)
            kinds = Counter(map(kind_of, lines[1:]))
            assert len(replay.requests) + replay.num_left_out == kinds["add"] + kinds["begin"]
            seen += kinds + Counter({"no room": sum(line.startswith('["reserve"') and line.endswith("false]\n") for line in lines)})
            num_preemptions, num_failures = num_preemptions + stats.num_preemptions, num_failures + kinds["fail"]
    assert all(seen[kind] > 10 for kind in (*MOVES, "no room")) and num_preemptions > 5 and num_failures > 3, (seen, num_preemptions)


@pytest.fixture(scope="module")
def recording() -> list[str]:
    """Of a side that has offered, released, resumed, reserved, begun and cancelled."""
    pair = Pair(0, "fcfs")
    pair.run(1500)
    return lines_of(pair.sides[0])


def kind_of(line: str) -> str:
    return str(json.loads(line)[0])


def changed(recording: list[str], kind: str, change: Callable[[list[Any]], list[Any] | None], nth: int = 1) -> list[str]:
    """With the nth line of a kind changed, or, by None, left out."""
    place = [i for i, line in enumerate(recording[1:], 1) if kind_of(line) == kind][nth]
    cells = change(json.loads(recording[place]))
    return [*recording[:place], *([] if cells is None else [json.dumps(cells) + "\n"]), *recording[place + 1 :]]


@pytest.mark.parametrize("kind", MOVES)
def test_without_a_move_it_is_another_run(recording: list[str], kind: str, tmp_path: Path) -> None:
    """But for a block that is held on where there are others."""
    found = 0
    for nth in range(3):
        try:
            told_again(changed(recording, kind, lambda cells: None, nth), tmp_path)
        except RecordingError as error:
            assert "run.jsonl: line " in str(error)
            found += 1
    assert found == 3 or (kind == "release" and found > 0)


@pytest.mark.parametrize("kind", MOVES)
@pytest.mark.parametrize(
    ("moment", "message"),
    [
        (float("nan"), "time of the KIND: .* is not allowed"),
        (1e300, "time of the KIND: .* is not allowed"),
        (0.0, "it is .* at 0.0 s, before the one above it at"),
    ],
)
def test_moments_of_moves_that_are_none_are_refused(recording: list[str], kind: str, moment: float, message: str, tmp_path: Path) -> None:
    with pytest.raises(RecordingError, match=message.replace("KIND", kind)):
        told_again(changed(recording, kind, lambda cells: [*cells[:2], moment, *cells[3:]]), tmp_path)


def test_room_that_was_not_there_is_not_found(recording: list[str], tmp_path: Path) -> None:
    for nth in range(4):
        was = list[bool]()

        def turned(cells: list[Any], was: list[bool] = was) -> list[Any]:
            was.append(cells[-1])
            return [*cells[:-1], not cells[-1]]

        lines = changed(recording, "reserve", turned, nth)
        found = "room, and the recorded run found none" if was[0] else "no room, and the recorded run found some"
        with pytest.raises(RecordingError, match=rf"step \d+: for 'r\d+' there is {found}"):
            told_again(lines, tmp_path)


@pytest.mark.parametrize(
    "line", ['["offer",0,0.0]', '["begin",0,0.0,"a",[5]]', '["cancel",0,0.0,"a"]', '["reserve",0,0.0,{},3,true]', '["release",0]']
)
def test_odd_moves_are_refused(recording: list[str], line: str, tmp_path: Path) -> None:
    with pytest.raises(RecordingError, match="line 2: "):
        told_again([recording[0], line + "\n"], tmp_path)


def test_a_recording_of_before_is_read_and_says_what_it_does_not_hold(recording: list[str], tmp_path: Path) -> None:
    """Version 1 has the same lines but those of hand-offs: without any it is replayed, else refused with the reason."""
    head = recording[0].replace('"version":2', '"version":1')
    first = next(i for i, line in enumerate(recording[1:], 1) if kind_of(line) in MOVES)
    assert told_again([head, *recording[1:first]], tmp_path).num_plans > 0
    rest = [line for line in recording[1:] if kind_of(line) not in MOVES]
    with pytest.raises(RecordingError, match="the plan is another than .* version 1 tells nothing of requests that go from one"):
        told_again([head, *rest], tmp_path)
    with pytest.raises(RecordingError, match='"version": 1 or 2 are needed'):
        told_again([recording[0].replace('"version":2', '"version":3')], tmp_path)


def handed_over(folder: Path, law: Law) -> tuple[TimedRun, TimedRun]:
    """Runs of a prefill and a decode engine of known times, recorded, that hand over six requests of 100 to 600 tokens."""
    sender, receiver = (TimedRun(law, record=str(folder / name), max_num_batched_tokens=64) for name in ("prefill", "decode"))
    for i in range(6):
        sender.add(f"r{i}", 100 * (i + 1), 30 + i)
        sender.run_until(f"r{i}")
        engine, name = sender.engine, f"r{i}"
        seq = engine.scheduler.transfers.sender_sequence(name)
        assert seq is not None
        tokens, request = engine.loop.offer(name), seq.request
        receiver.times_s[name] = []
        assert receiver.engine.scheduler.transfers.reserve(request, len(request.prompt_token_ids)) is not None
        for _ in range(4):  # others decode while its KV comes
            receiver.step()
        receiver.engine.begin(request, tokens)
        engine.release(name)
    while receiver.engine.has_work:
        receiver.step()
    for run in (sender, receiver):
        run.engine.close()
    return sender, receiver


def test_simulate_takes_what_a_worker_has_whole(tmp_path: Path) -> None:
    handed_over(tmp_path, Law())
    run = CliRunner().invoke(cli, ["simulate", "--replay", str(tmp_path / "decode")])
    assert run.exit_code == 0 and json.loads(run.output.splitlines()[-1])["num_completed"] == 6 and "left out" not in run.output
    run = CliRunner().invoke(cli, ["simulate", "--replay", str(tmp_path / "prefill")])
    assert run.exit_code == 2 and "no request is in it: 6 left for another worker" in run.output
    load = ("--num-kv-blocks", "64", "--rate", "20", "--num-requests", "5")
    run = CliRunner().invoke(cli, ["simulate", "--fitted", str(tmp_path / "prefill"), *load])
    assert run.exit_code == 0 and json.loads(run.output.splitlines()[-1])["num_completed"] == 5


def test_the_prices_of_a_decode_worker_have_no_prompt_in_them(tmp_path: Path) -> None:
    law = Law()
    sender, receiver = handed_over(tmp_path, law)
    shapes = list[StepShape]()
    replay = replay_recording(tmp_path / "decode", lambda plan, _: shapes.append(StepShape.of(plan)))
    assert (replay.num_taken_over, replay.num_handed_over, replay.num_left_out, replay.num_preemptions) == (6, 0, 0, 0)
    assert [(len(work.prompt_token_ids), work.num_output) for work in replay.requests] == [(100 * (i + 1), 30 + i) for i in range(6)]
    assert sum(shape.num_rows for shape in shapes) == sum(29 + i for i in range(6)), "one for each token but the first, none of prompts"
    cost = replay.coefficients()
    for shape in shapes:
        assert cost.seconds_of(shape) == pytest.approx(law.seconds(shape) + HOST_S, rel=0.02)
    gone = replay_recording(tmp_path / "prefill")
    assert (gone.num_handed_over, gone.num_taken_over, gone.num_left_out, gone.requests) == (6, 0, 6, [])
    assert gone.left_out() == "6 left for another worker" and not replay.left_out()
    assert sum(sample[0] for sample in gone.samples) == 100 * 21, "prompts alone"
    assert gone.device_s == pytest.approx(sum(sender.device.seconds)) and replay.device_s == pytest.approx(sum(receiver.device.seconds))
