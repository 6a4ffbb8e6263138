"""`octavo calibrate` and `octavo bench simulator`: files where engines look for them, figures, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from octavo.costs.coefficients import Coefficients, FittedFor, read_coefficients
from tests.cli.conftest import Octavo

SMALL = ("--threads", "1", "--max-num-seqs", "4", "--max-num-batched-tokens", "64", "--num-kv-blocks", "200", "--max-model-len", "256")


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OCTAVO_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def test_a_cost_is_written_where_engines_look_and_simulations_take_it(octavo: Octavo, tiny: Path, home: Path) -> None:
    ended = octavo("calibrate", "-m", tiny, "--seconds", "0.1", *SMALL)
    assert ended.code == 0, ended.err
    assert "calibrating: " in ended.err and " of 0.1 s: 1 scene, " in ended.err
    record = json.loads(ended.out.splitlines()[-1])
    (file,) = (home / "costs").iterdir()
    assert record["calibrate"] == str(file) and f"written to {file}" in ended.out
    for text in ("held-out steps", "median error", "decode, ms", "prompt, ms", "per sequence", "after idleness"):
        assert text in ended.out
    cost = read_coefficients(file)
    assert record["num_steps"] == cost.num_steps and record["errors"]["all"]["num_steps"] == cost.errors["all"].num_steps
    assert cost.fitted_for is not None and (cost.fitted_for.threads, cost.fitted_for.model) == (1, "tiny")
    load = ("--rate", "20", "--num-requests", "5", "--prompt-len", "20", "--output-len", "4", "--num-kv-blocks", "64", "--json")
    assert json.loads(octavo("simulate", "--fitted", file, *load).out)["num_completed"] == 5


def test_a_cost_can_be_written_elsewhere(octavo: Octavo, tiny: Path, home: Path, tmp_path: Path) -> None:
    out = tmp_path / "cost.json"
    ended = octavo("calibrate", "-m", tiny, "--seconds", "0.1", "--out", out, "--json", *SMALL)
    assert ended.code == 0 and len(ended.out.splitlines()) == 1
    assert read_coefficients(out).num_steps > 0 and not (home / "costs").exists()


@pytest.mark.parametrize("out", ["/dev/null", "none/cost.json", "/proc/cost.json"])
def test_where_nothing_can_be_written_nothing_is_measured(octavo: Octavo, tiny: Path, tmp_path: Path, out: str) -> None:
    ended = octavo("calibrate", "-m", tiny, "--seconds", "3600", "--out", tmp_path / out, *SMALL)
    assert ended.code == 2 and f"'--out': {tmp_path / out}: " in ended.err and "calibrating" not in ended.err
    assert not (tmp_path / "none").exists() and not Path("/dev/null").is_file()


def test_engines_own_folder_is_tried_before_measuring(octavo: Octavo, tiny: Path, home: Path) -> None:
    home.mkdir()
    (home / "costs").write_text("no folder")
    ended = octavo("calibrate", "-m", tiny, "--seconds", "3600", *SMALL)
    assert ended.code == 1 and str(home / "costs") in ended.err and "calibrating" not in ended.err


def test_the_simulator_is_compared_with_the_engine(octavo: Octavo, tiny: Path) -> None:
    """Moments of each load: the table and the record are whole."""
    flags = ("--repeat", "1", "--seconds", "0.03", "--calibrate-seconds", "0.1")
    ended = octavo("bench", "simulator", "-m", tiny, *flags, *SMALL)
    assert ended.code == 0, ended.err
    record = json.loads(ended.out.splitlines()[-1])
    assert record["bench"] == "simulator" and record["num_failed"] == 0
    assert len(record["figures"]) == 25 and len(record["loads"]) == 5
    assert {one["figure"] for one in record["figures"]} == {"ttft_p50_s", "ttft_p99_s", "itl_s", "output_per_s", "slo_share"}
    assert "of 25 figures agree" in ended.out and "measuring: " in ended.err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("calibrate", "-m", "TINY", "--seconds", "0"), "--seconds"),
        (("calibrate", "-m", "TINY", "--seconds", "nan"), "--seconds"),
        (("calibrate", "-m", "TINY", "--threads", "0"), "--threads"),
        (("bench", "simulator", "-m", "TINY", "--seconds", "0"), "--seconds"),
        (("bench", "simulator", "-m", "TINY", "--calibrate-seconds", "inf"), "--calibrate-seconds"),
        (("bench", "simulator", "-m", "TINY", "--spec", "2"), "--spec"),
        (("bench", "simulator", "-m", "TINY", "--swap-space", "1M"), "--kv-host-memory"),
    ],
)
def test_what_is_refused(octavo: Octavo, tiny: Path, argv: tuple[str, ...], message: str) -> None:
    ended = octavo(*(tiny if word == "TINY" else word for word in argv))
    assert ended.code == 2 and message in ended.err and ended.out == ""


def test_a_cost_of_something_else_is_refused(octavo: Octavo, tiny: Path, tmp_path: Path) -> None:
    file = tmp_path / "cost.json"
    file.write_text(Coefficients((1e-4,) * 6, fitted_for=FittedFor("a machine", "avx2", 7, "a model")).to_json())
    ended = octavo("bench", "simulator", "-m", tiny, "--fitted", file, *SMALL)
    assert ended.code == 1 and "--fitted: it holds for a model on 7 threads of a machine, not for this engine" in ended.err


def test_a_cost_that_is_none_is_an_error(octavo: Octavo, tiny: Path, tmp_path: Path) -> None:
    file = tmp_path / "cost.json"
    file.write_text("{}")
    ended = octavo("bench", "simulator", "-m", tiny, "--fitted", file)
    assert ended.code == 1 and "octavo-step-cost" in ended.err
