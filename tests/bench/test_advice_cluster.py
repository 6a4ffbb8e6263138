"""`octavo bench advice --cluster`: its loads, its switches, and real pairs of clusters for a moment. What it finds is no verdict here."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from octavo.bench.advice import AdviceCase, measure
from octavo.bench.advice_cluster import (
    CLUSTER_KINDS,
    ClusterThrown,
    ClusterTrial,
    LoopThread,
    Setting,
    Talk,
    asked_of,
    cluster_trials,
    thrown_in_clusters,
)
from octavo.bench.advice_engine import configured
from octavo.cli.bench import bench
from octavo.core.cluster_window import ClusterWindow
from octavo.core.recorded_window import RecordedWindow, WindowReplay
from octavo.distributed.cluster_options import ClusterOptions
from octavo.distributed.local_cluster import worker_names
from octavo.engine.llm import make_config
from octavo.simulator.cluster_what_if import ClusterWhatIf
from tests.engine.planted import steady_load
from tests.engine.scripted import bigram_config
from tests.engine.timed import Law
from tests.models.tiny import write_tiny_gguf
from tests.simulator.timed_cluster import TimedCluster

CASE = AdviceCase(24)
SETTINGS = {"num_kv_blocks": 200, "max_num_seqs": 4, "max_num_batched_tokens": 64, "threads": 1}
TALK = Talk(2, (4, 8), (3, 6), beginning=48, conversations=3)


def lengths_of(case: AdviceCase, talk: Talk) -> list[int]:
    """Of all prompts of a run, with all that comes before what is new in them, answers included."""
    asked, beginnings = asked_of(case, talk, (4, 100), 0)
    said, found = [len(one) for one in beginnings], []
    for one in asked:
        found.append(said[one.conversation] + len(one.token_ids))
        said[one.conversation] = found[-1] + one.num_output
    return found


# --- loads ------------------------------------------------------------------------------------------------------------------------------


def test_runs_have_the_same_lengths_and_no_token_in_common() -> None:
    first, second = (asked_of(CASE, TALK, (4, 1 << 20), run) for run in (0, 1))
    for one, other in zip(first[0], second[0], strict=True):
        assert (one.conversation, len(one.token_ids), one.num_output) == (other.conversation, len(other.token_ids), other.num_output)
        assert one.token_ids != other.token_ids
    assert all(one != other for one, other in zip(first[1], second[1], strict=True))
    turns = [one.conversation for one in first[0]]
    assert [sorted(turns[i : i + 3]) for i in range(0, 24, 3)] == [[0, 1, 2]] * 8  # each has its turn in every round
    assert len({tuple(turns[i : i + 3]) for i in range(0, 24, 3)}) > 1, "sent to each worker in turn, each would come to its own"
    apart = asked_of(CASE, replace(TALK, conversations=0, beginning=0), (4, 100), 0)
    assert len({one.conversation for one in apart[0]}) == 24 and apart[1] == [[]] * 24


# --- switches ---------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CLUSTER_KINDS)
def test_each_switch_is_one_of_those_that_are_replayed(name: str) -> None:
    (thrown,) = (one for one in thrown_in_clusters(16) if one.name == name)
    options = ClusterOptions(router=thrown.without.router)
    window = TimedCluster(worker_names(thrown.without.workers), Law(), options).serve(steady_load(20, 20.0, 1)).window()
    found = [switch for switch in ClusterWhatIf(window).switches if switch.kind == thrown.kind]
    with_it = thrown.with_it
    if name == "router":
        found = [switch for switch in found if switch.change.split()[-1] in thrown.values]
        assert [switch.setup.front_end.router for switch in found] == [with_it.router]
    elif name != "nothing":
        assert [switch.setup.flag for switch in found] == [switch_flag(with_it)]
    assert len(found) == 1


def switch_flag(setting: Setting) -> str:
    if setting.workers.keys() == {"both"}:
        return f"--workers {setting.workers['both']}"
    return "--workers " + ",".join(f"{role}={number}" for role, number in setting.workers.items())


def test_every_prompt_of_a_case_fits_into_its_pools_and_the_usual_context() -> None:
    for thrown in thrown_in_clusters(16):
        most = max(lengths_of(AdviceCase(), thrown.talk)) + thrown.talk.output[1]
        for setting in (thrown.without, thrown.with_it):
            blocks = configured(bigram_config(), setting.fields).cache.num_kv_blocks
            assert blocks is not None and most <= min(2048, 16 * blocks // 2)
    (router,) = (one for one in thrown_in_clusters(16) if one.name == "router")
    held = 16 * router.without.fields[1]["num_kv_blocks"]
    all_talks = sum(sorted(lengths_of(AdviceCase(), router.talk))[-8:])
    assert held < all_talks < 2 * held, "one cache would hold all, or two would not"


def test_what_is_not_allowed() -> None:
    def said(*argv: str) -> str:
        found = CliRunner().invoke(bench.commands["advice"], ["--cluster", *argv])
        assert found.exit_code == 2
        return " ".join(found.output.split())

    assert "it does nothing with --cluster" in said("--load", "0.5")
    assert "'places' is not allowed; one of router, more, apart, together, nothing" in said("--switch", "places")
    assert [one.name for one in cluster_trials(bigram_config(), CASE)] == list(CLUSTER_KINDS)


# --- real clusters ----------------------------------------------------------------------------------------------------------------------


def test_a_loop_ends_with_its_thread_and_passes_errors_on() -> None:
    async def fails() -> int:
        raise KeyError("x")

    with closing(LoopThread()) as loop, pytest.raises(KeyError):
        loop.do(fails())
    assert not loop._thread.is_alive()


def replayer(kind: str, windows: list[ClusterWindow]) -> Iterator[object]:
    """Replays a window with the switches of one kind alone."""

    def replay(window: RecordedWindow | ClusterWindow) -> WindowReplay:
        assert isinstance(window, ClusterWindow)
        windows.append(window)
        one = ClusterWhatIf(window)
        one.switches = [switch for switch in one.switches if switch.kind == kind]
        return replace(one.base(), outcomes=tuple(one.outcomes()))

    yield replay


CASES = {
    "router": (Setting(router="round-robin"), Setting(router="soonest"), ["soonest"], "--router soonest"),
    "together": (Setting({"prefill": 1, "decode": 1}), Setting(), [], "prefill and decode together (--workers 2)"),
}


@pytest.mark.parametrize("kind", CASES)
def test_a_switch_of_real_clusters(kind: str, tmp_path: Path) -> None:
    """Every request of the first run is in the window, each turn behind all before it; the switch is found and has figures."""
    without, with_it, values, change = CASES[kind]
    config = make_config(str(write_tiny_gguf(tmp_path / "m.gguf", context=512)), **SETTINGS)
    trial = ClusterTrial(config, CASE, ClusterThrown(kind, kind, "wall", without, with_it, TALK, values), (4, 100))
    windows = list[ClusterWindow]()
    outcome = measure(trial, 2, *replayer(kind, windows))
    (window,) = windows
    assert outcome.change == change and min(outcome.seconds_each) > 0.0 and outcome.rate is None
    assert {worker.name: worker.role for worker in window.workers} == worker_names(without.workers)
    assert window.front_end.router == without.router and not window.from_start and window.notes == ()
    assert sorted(one.num_prompt for one in window.requests) == sorted(lengths_of(CASE, TALK))
    talks = defaultdict(list)
    for one in window.requests:
        talks[one.keys[0]].append(one)
    assert len(talks) == 3
    for talk in talks.values():
        turns = sorted(talk, key=lambda one: one.num_prompt)
        for earlier, later in zip(turns, turns[1:], strict=False):
            assert later.keys[: len(earlier.keys)] == earlier.keys
