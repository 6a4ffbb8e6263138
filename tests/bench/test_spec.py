"""`octavo bench spec`: the record, and that a text that differs is an error. No verdict depends on speed."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from octavo.bench import spec
from octavo.bench.spec import Gain, SpecCase, foretell, run_spec
from octavo.bench.spec_prompts import WORKS
from octavo.engine.engine import Engine
from octavo.engine.llm import make_config
from tests.models.tiny import write_tiny_gguf


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_gguf(tmp_path_factory.mktemp("models") / "rand.gguf", context=2048)


def run(path: Path, case: SpecCase, as_json: bool = False, **options: object) -> list[str]:
    lines: list[str] = []
    run_spec(make_config(str(path), num_kv_blocks=400, threads=1, **options), case, lines.append, as_json)
    return lines


def test_record(path: Path) -> None:
    *said, record = run(path, SpecCase(("edit", "code"), (1, 3), 12, 2, 0.7, 4, "ngram", True))
    data = json.loads(record)
    assert [(row["work"], row["batch"]) for row in data["cases"]] == [("edit", 1), ("edit", 3), ("code", 1), ("code", 3)]
    for row in data["cases"]:
        assert row["plain_tok_s"] > 0 < row["spec_tok_s"] and row["lowest_ratio"] <= row["ratio"]
        assert 0 <= row["accepted"] <= row["drafted"]
        assert row["alpha"] is None or 0 <= row["alpha"] <= 1
        assert row["overlap"] is None  # coupling does not know it
    assert [row["k"] for row in data["lengths"]] == list(range(1, 9))
    text = "\n".join(said)
    assert "tokens a step" in text and "predicted gain" in text
    assert len(run(path, SpecCase(("code",), (1,), 4, 1, 0.0, "auto", "auto", False), as_json=True)) == 1


def test_a_text_that_differs_is_an_error(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measure, calls = spec.measure, iter(range(99))

    def other(*args: object) -> object:
        found = measure(*args)  # type: ignore[arg-type]
        return replace(found, tokens=((1,),)) if next(calls) == 3 else found

    monkeypatch.setattr(spec, "measure", other)
    with pytest.raises(ValueError, match="code, batch 1: the text with drafts is not that without"):
        run(path, SpecCase(("code",), (1,), 4, 1, 0.0, 2, "ngram", False))


def test_what_is_foretold_comes_from_a_round_before(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, compare, asked = Engine.load(make_config(str(path), num_kv_blocks=400, threads=1)), spec.compare, list[Gain]()
    case = SpecCase(("code",), (1,), 9, 2, 0.0, 3, "ngram", False)
    monkeypatch.setattr(spec, "compare", lambda *args: asked.append(compare(*args)) or asked[-1])
    try:
        gain = foretell(engine, WORKS[0].prompts[:1], case, 3, "ngram")
        assert gain == replace(asked[0], measured=asked[1].measured) and len(asked) == 2
        assert gain.k == 3 and 0 <= gain.alpha <= 1 and 0 <= gain.share <= 1 and gain.step_ratio > 0 < gain.measured
        measure = spec.measure
        monkeypatch.setattr(spec, "measure", lambda *args: replace(measure(*args), tokens=((len(asked), id(args[-1])),)))
        with pytest.raises(ValueError, match="3 drafts by ngram: the text with drafts is not that without"):
            compare(engine, WORKS[0].prompts[:1], case, 3, "ngram")
    finally:
        engine.close()


def test_the_accept_resample_rule(path: Path) -> None:
    """Sampled texts may differ, and the overlap of the distributions is told; it is an estimate of the same alpha."""
    case = SpecCase(("code",), (4,), 40, 1, 1.0, 3, "self", False)
    (row,) = json.loads(run(path, case, True, spec_rule="resample", self_draft_layers=1)[-1])["cases"]
    assert row["drafted"] > 60 and row["overlap"] == pytest.approx(row["alpha"], abs=0.25)
    greedy = SpecCase(("code",), (1,), 12, 1, 0.0, 3, "self", False)
    assert json.loads(run(path, greedy, True, spec_rule="resample", self_draft_layers=1)[-1])["rule"] == "resample"


def test_works() -> None:
    assert {work.name for work in WORKS if work.copies} == {"edit", "json"} and len(WORKS) == 5
    assert all(len(work.prompts) == len(set(work.prompts)) == 4 for work in WORKS)
