"""What a hand-off costs, measured with real workers of a tiny model: the figures are the machine's, their making is looked at here."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from octavo.bench import handoff, netns
from octavo.bench.handoff import HandoffBenchError, HandoffCase, Row, Timed, run_handoff, table_of
from octavo.engine.llm import make_config
from tests.distributed.clusters import children_find_the_sources
from tests.models.tiny import write_tiny_gguf


def timed(*times_s: float) -> Timed:
    return Timed(list(times_s), list(range(len(times_s))))


def test_the_second_token_is_held_against_the_later_gaps_of_the_worker_alone() -> None:
    """Medians over all answers; the gap before the second token is no later gap."""
    answers = [timed(0.1, 0.13, 0.15, 0.17), timed(0.2, 0.23, 0.25, 0.27), timed(0.3, 0.4, 0.42, 0.44)]
    alone = handoff._row("alone", None, 100, 8, answers, None)
    assert (alone.ttft_ms, alone.kv_bytes, alone.second_over, alone.e2e_over) == (200.0, 800, None, None)
    assert [alone.second_ms, alone.gap_ms, alone.e2e_ms] == pytest.approx([30.0, 20.0, 270.0])
    split = handoff._row("serial", 1.0, 100, 8, [timed(0.2, 0.26, 0.28, 0.297)], alone)
    assert [split.second_over, split.e2e_over] == pytest.approx([200.0, 10.0])


def test_the_table_goes_by_prompts_and_then_as_it_was_measured() -> None:
    ways = (("alone", None), ("serial", 10.0), ("layer-wise", 10.0))
    rows = [Row(way, link, n, n, 1.0, 2.0, 3.0, 4.0) for way, link in ways for n in (1, 2)]
    lines = [line.split()[:4] for line in table_of(rows).splitlines()[1:]]
    assert [line[0] for line in lines] == ["1", "1", "1", "2", "2", "2"]
    assert lines[0][2] == "alone" and lines[1][2:] == ["10", "serial"] and lines[5][2:] == ["10", "layer-wise"]


def case(**options: object) -> HandoffCase:
    return HandoffCase(**{  # type: ignore[arg-type]
        "prompts": (20, 70), "num_output": 4, "repeat": 1, "transport": "tcp", "wire_dtype": "auto", "threads": 1, **options
    })  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with children_find_the_sources():
        yield str(write_tiny_gguf(tmp_path_factory.mktemp("models") / "m.gguf", context=256))


def measured(model: str, wanted: HandoffCase) -> list[tuple[str, float | None, int]]:
    said = list[str]()
    config = make_config(model, num_kv_blocks=64, max_num_seqs=4, max_num_batched_tokens=32)
    record = run_handoff(config, wanted, said.append, as_json=True)
    assert json.loads(said[-1]) == json.loads(json.dumps(record)) and len(said) == 1
    assert all(row["second_ms"] > 0 and (row["second_over"] is None) == (row["way"] == "alone") for row in record["rows"])
    return [(row["way"], row["link_gbps"], row["num_prompt"]) for row in record["rows"]]


def test_answers_are_handed_over_and_equal(model: str) -> None:
    """It raises where one is not, or another."""
    rows = [("alone", None), ("serial", 0.5), ("layer-wise", 0.5)]
    assert measured(model, case(links=(0.5,))) == [(*row, n) for row in rows for n in (20, 70)]


def test_a_prompt_that_no_worker_holds_is_told_of(model: str) -> None:
    with pytest.raises(HandoffBenchError, match="300 tokens and their answer are 304; a worker holds 256"):
        measured(model, case(prompts=(20, 300)))


@pytest.mark.soak
@pytest.mark.skipif(netns.missing() is not None, reason=str(netns.missing()))
def test_hosts_of_their_own_are_made_and_taken_down(model: str) -> None:
    wanted = case(links=(1.0, 10.0), in_namespaces=True, prompts=(70,))
    rows = [("alone", None), ("serial", 1.0), ("layer-wise", 1.0), ("serial", 10.0), ("layer-wise", 10.0)]
    assert measured(model, wanted) == [(*row, 70) for row in rows]
