"""`octavo plan`: the memory calculator, plans for a load, what is printed, exit codes, and flags that contradict each other."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from octavo.costs.coefficients import Coefficients
from tests.cli.conftest import Ended, Octavo
from tests.models import configs

MACHINES = """
[small]
basis = "measured"
ops_per_s = 3e9
bytes_per_s = 1e9
memory_bytes = 4e6
busy_w = 50
idle_w = 5
usd_per_hour = 1.0
host_s = 0.02
step_error = 0.1
[large]
like = "small"
basis = "datasheet"
ops_per_s = 12e9
bytes_per_s = 4e9
busy_w = 150
usd_per_hour = 2.5
"""
QUICK = ("--precision", "0.3", "--seeds", "0,1", "--max-num-batched-tokens", "64", "--max-num-seqs", "4", "--max-simulated", "4000")
LIMITS = ("--slo", "ttft=0.2,itl=0.05")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Configs, machines and a trace."""
    folder = tmp_path_factory.mktemp("plan")
    for name in ("LLAMA_2_7B", "OPT_13B", "GEMMA_3_1B"):
        (folder / f"{name.lower()}.json").write_text(json.dumps(getattr(configs, name)))
    (folder / "machines.toml").write_text(MACHINES)
    rows = "".join(f"{0.1 * i:.1f},{20 + i % 9},{2 + i % 5}\n" for i in range(50))
    (folder / "trace.csv").write_text(f"arrival_s,num_prompt,num_output\n{rows}")
    return folder


def record_of(ended: Ended, code: int = 0) -> dict[str, Any]:
    assert ended.code == code, ended.err
    assert len(ended.out.splitlines()) == 1

    def refuse(text: str) -> float:
        raise AssertionError(f"{text} is no JSON")

    record = json.loads(ended.out, parse_constant=refuse)
    assert isinstance(record, dict)
    return record


# --- memory -----------------------------------------------------------------------------------------------------------------------------


def test_llama_2_before_the_download(octavo: Octavo, folder: Path) -> None:
    flags = ("plan", "--fit", "--model", folder / "llama_2_7b.json", "--context", "4096", "--sequences", "1", "--kv-dtype", "f16")
    record = record_of(octavo(*flags, "--json"))
    assert (record["kv_bytes"], record["kv_bytes_per_token"], record["weight_bytes"]) == (2_147_483_648, 524_288, 2 * 6_738_415_616)
    assert record["num_kv_blocks"] * record["kv_bytes_per_block"] == record["kv_bytes"] and record["warnings"] == []
    shown = octavo(*flags)
    for text in ("2,147,483,648", "2.00 GiB", "524,288", "32 KV heads of 128", "1 sequence of 4,096 tokens: 256 blocks of 16 tokens"):
        assert text in shown.out
    assert shown.code == 0 and shown.err == ""


def test_opt_is_sized_and_not_served(octavo: Octavo, folder: Path) -> None:
    record = record_of(octavo("plan", "--fit", "-m", folder / "opt_13b.json", "--kv-dtype", "f16", "--json"))
    assert (record["kv_bytes_per_token"], record["context"], record["activation_bytes"]) == (819_200, 2048, None)
    assert "not served by Octavo" in octavo("plan", "--fit", "-m", folder / "opt_13b.json").out
    ended = octavo("plan", "-m", folder / "opt_13b.json", *LIMITS)
    assert ended.code == 2 and "--model" in ended.err and "no program to price" in ended.err


def test_room_for_conversations(octavo: Octavo, folder: Path) -> None:
    flags = ("plan", "--fit", "-m", folder / "llama_2_7b.json", "--context", "4096", "--kv-dtype", "f16")
    record = record_of(octavo(*flags, "--memory", "24GiB", "--json"))
    assert record["fits"] and record["sequences_that_fit"] == 5 and record["memory_bytes"] == 24 << 30
    assert "At most 5 such sequences have room" in octavo(*flags, "--memory", "24GiB").out
    ended = octavo(*flags, "--memory", "13GiB")
    assert ended.code == 1 and "no room for 1 sequence of 4,096 tokens: " in ended.out and "bytes (1.59 GiB) are missing" in ended.out
    assert not record_of(octavo(*flags, "--memory", "13GiB", "--json"), 1)["fits"]


def test_windows_and_longer_contexts_are_told(octavo: Octavo, folder: Path) -> None:
    flags = ("plan", "--fit", "-m", folder / "gemma_3_1b.json", "--context", "40000")
    shown = octavo(*flags).out
    assert "22 of them with a window" in shown and "beyond windows" in shown and "more than the 32768 tokens" in shown
    record, whole = (record_of(octavo(*flags, "--json", *more)) for more in ((), ("--no-enable-kv-groups",)))
    assert record["kv_bytes"] < whole["kv_bytes"] == 40_000 * 26_624 and len(record["warnings"]) == 1


def test_a_file_as_it_will_be_served(octavo: Octavo, tiny: Path) -> None:
    record = record_of(octavo("plan", "--fit", "-m", tiny, "--context", "100", "--sequences", "3", "--kv-dtype", "int8", "--json"))
    assert record["kv_bytes"] == 3 * 7 * record["kv_bytes_per_block"] and record["architecture"] == "llama"


@pytest.mark.parametrize(
    ("config", "message"),
    [({"model_type": "mamba"}, "model_type: 'mamba'"), ({"model_type": "x", "kv_lora_rank": 512}, "kv_lora_rank: 512 is not allowed")],
)
def test_what_cannot_be_sized_names_its_field(octavo: Octavo, tmp_path: Path, config: dict[str, Any], message: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    for flags in (("--fit",), LIMITS):
        ended = octavo("plan", "-m", path, *flags)
        assert ended.code == 1 and f"{path}: {message}" in ended.err and ended.out == ""


# --- machines ---------------------------------------------------------------------------------------------------------------------------


def test_a_plan_for_a_trace(octavo: Octavo, folder: Path, tiny: Path) -> None:
    flags = ("plan", "-m", tiny, "--machines", folder / "machines.toml", "--trace", folder / "trace.csv", *LIMITS, *QUICK)
    record, shown = record_of(octavo(*flags, "--json")), octavo(*flags)
    assert record["rate"] == pytest.approx(10.0) and record["load"]["num_requests"] == 50
    assert record["slo"] == {"ttft_s": 0.2, "itl_s": 0.05}
    best = record["best"]
    assert best["attainment_least"] >= 0.9 and best["usd_per_hour"] is not None and best["peak_w"] > 0
    assert {one["outcome"].split(",")[0] for one in record["considered"]} & {"holds"}
    assert all(trial["seed"] in (0, 1) for trial in record["tried"])
    for text in ("-> ", best["fleet"], "USD/h", "2 seeds", "error: small 10 %", "Limits   TTFT 200 ms, mean ITL 50 ms, kept by 90 %"):
        assert text in shown.out, text
    assert shown.code == 0 and "nan" not in shown.out and "trial 1 (" in shown.err
    assert max(map(len, shown.out.splitlines())) <= 160


def test_highest_rates_alone(octavo: Octavo, folder: Path, tiny: Path) -> None:
    flags = ("plan", "-m", tiny, "--machines", folder / "machines.toml", "--machine", "small", "--prompt-len", "20", "--output-len", "4")
    record = record_of(octavo(*flags, *LIMITS, *QUICK, "--json"))
    (kind,) = record["machines"]
    assert record["best"] is None and record["rate"] is None and 0 < kind["holds_at"] < kind["fails_at"]
    low, high = 0.3 * kind["holds_at"], 0.6 * kind["holds_at"]
    (limited,) = record_of(octavo(*flags, *LIMITS, *QUICK, "--rate-range", f"{low}:{high}", "--json"))["machines"]
    assert low <= limited["holds_at"] <= high and limited["fails_at"] is None


def test_budgets_and_limits_that_nothing_keeps(octavo: Octavo, folder: Path, tiny: Path) -> None:
    flags = ("plan", "-m", tiny, "--machines", folder / "machines.toml", "--machine", "small", "--trace", folder / "trace.csv", *QUICK)
    ended = octavo(*flags, *LIMITS, "--budget", "0.5")
    assert ended.code == 1 and "nothing that was tried keeps the limits within the budget." in ended.out
    assert "over the budget of 0.5 USD/h" in ended.out
    ended = octavo(*flags, "--slo", "ttft=1,itl=0.0001")
    assert ended.code == 1 and "one answer alone takes" in ended.out


def test_budgets_that_nothing_can_be_held_against_are_refused(octavo: Octavo, folder: Path, tiny: Path, tmp_path: Path) -> None:
    unknown = tmp_path / "unknown.toml"
    unknown.write_text('[m]\nbasis = "measured"\nops_per_s = 3e9\nbytes_per_s = 1e9\nmemory_bytes = 4e6\n')
    flags = ("plan", "-m", tiny, *LIMITS, "--prompt-len", "20", "--output-len", "3", *QUICK)
    for budget, figure in (("--budget", "usd_per_hour"), ("--power-budget", "busy_w")):
        ended = octavo(*flags, "--machines", unknown, "--rate", "5", budget, "10")
        assert ended.code == 2 and f"'{budget}': there is no {figure} of m; a file of --machines gives it" in ended.err
        ended = octavo(*flags, "--machines", folder / "machines.toml", budget, "10")
        assert ended.code == 2 and f"'{budget}': it has no meaning without --rate or --trace" in ended.err


def test_what_the_figures_rest_on_is_told_by_their_basis(octavo: Octavo, folder: Path, tiny: Path, tmp_path: Path) -> None:
    own = tmp_path / "own.toml"
    own.write_text(MACHINES.replace("step_error = 0.1\n", ""))
    shown = octavo("plan", "-m", tiny, "--machines", own, *LIMITS, "--prompt-len", "20", "--output-len", "3", "--rate", "1", *QUICK)
    assert "Seconds of a step on small: by figures that the file of machines calls measured, no error stated" in shown.out
    assert "Seconds of a step on large: by makers' figures, no error stated" in shown.out
    assert "To serve 1 request/s, least USD per hour first" in shown.out


def test_a_model_that_fits_nowhere(octavo: Octavo, folder: Path) -> None:
    flags = ("plan", "-m", folder / "llama_2_7b.json", "--machines", folder / "machines.toml", "--trace", folder / "trace.csv", *LIMITS)
    ended = octavo(*flags)
    assert ended.code == 1 and "The model fits on none of these machines." in ended.out and "bytes (12.61 GiB) are missing" in ended.out
    record = record_of(octavo(*flags, "--json"), 1)
    assert record["fits"] is False and min(kind["missing_bytes"] for kind in record["machines"]) > 13e9


def test_a_fitted_machine(octavo: Octavo, folder: Path, tiny: Path, tmp_path: Path) -> None:
    cost = tmp_path / "cost.json"
    cost.write_text(Coefficients((1e-5, 0.0, 1e-8, 0.0, 0.0, 2e-2), median_error=0.07).to_json())
    flags = ("plan", "-m", tiny, "--fitted", cost, "--trace", folder / "trace.csv", *LIMITS, *QUICK)
    record = record_of(octavo(*flags, "--memory", "4M", "--json"))
    assert [kind["machine"] for kind in record["machines"]] == ["fitted"] and record["machines"][0]["step_error"] == 0.07
    ended = octavo(*flags)
    assert ended.code == 2 and "--memory" in ended.err
    (tmp_path / "m.toml").write_text(MACHINES.replace("[large]", "[fitted]"))
    ended = octavo(*flags, "--memory", "4M", "--machines", tmp_path / "m.toml")
    assert ended.code == 2 and "--fitted" in ended.err and "a machine of --machines is named 'fitted' too" in ended.err


def test_designs_of_a_machine_file(octavo: Octavo, folder: Path, tiny: Path, tmp_path: Path) -> None:
    designs = '[design.split]\nprefill = "large"\ndecode = "small"\nnum_prefill = 1\nnum_decode = 2\n'
    (tmp_path / "m.toml").write_text(MACHINES + designs)
    flags = ("plan", "-m", tiny, "--machines", tmp_path / "m.toml", "--trace", folder / "trace.csv", *LIMITS, *QUICK)
    record = record_of(octavo(*flags, "--json"))
    assert record["best"]["fleet"] == "1 x large for prefill + 2 x small for decode" and record["colocated"] is None


def test_a_design_by_its_name(octavo: Octavo, folder: Path, tiny: Path, tmp_path: Path) -> None:
    designs = '[design.split]\nprefill = "large"\ndecode = "small"\nnum_prefill = 1\nnum_decode = 2\n[design.one]\nboth = "small"\n'
    (tmp_path / "m.toml").write_text(MACHINES + designs)
    flags = ("plan", "-m", tiny, "--trace", folder / "trace.csv", *LIMITS, *QUICK, "--json")
    record = record_of(octavo(*flags, "--machines", tmp_path / "m.toml", "--design", "split"))
    assert record["best"]["fleet"] == "1 x large for prefill + 2 x small for decode" and record["colocated"] is None
    ended = octavo(*flags, "--machines", tmp_path / "m.toml", "--design", "x")
    assert ended.code == 2 and "'--design': 'x' is not allowed; one of split, one" in ended.err


def test_designs_of_published_clusters_come_along(octavo: Octavo, folder: Path) -> None:
    flags = ("plan", "-m", folder / "llama_2_7b.json", "--trace", folder / "trace.csv", *LIMITS, *QUICK, "--json")
    record = record_of(octavo(*flags, "--design", "HA"))
    assert record["best"]["fleet"] == "1 x 8*dgx-h100 for prefill + 1 x 8*dgx-a100 for decode"
    assert [kind["machine"] for kind in record["machines"]] == ["dgx-a100", "dgx-h100"] and record["minimize"] == "usd"
    ended = octavo(*flags, "--design", "AH")
    assert ended.code == 2 and "'AH' is not allowed; one of AA, HH, HA, HHcap, baseline-a100, baseline-h100" in ended.err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[m]\n", "m.toml: m: basis is missing"), (MACHINES + "speed = 1\n", "large: speed is unknown"),
        ("[m\n", "m.toml: "), (MACHINES + '[design.x]\nboth = "huge"\n', "design.x: both: 'huge' is not allowed"),
    ],
)  # fmt: skip
def test_damaged_machine_files_name_the_field(octavo: Octavo, folder: Path, tiny: Path, tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "m.toml").write_text(text)
    ended = octavo("plan", "-m", tiny, "--machines", tmp_path / "m.toml", "--trace", folder / "trace.csv", *LIMITS)
    assert ended.code == 1 and message in ended.err and ended.out == ""


def test_damaged_traces_name_line_and_field(octavo: Octavo, tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("arrival_s,num_prompt,num_output\n0,5,5\n1,-5,5\n")
    flags = ("plan", "-m", tiny, "--trace", tmp_path / "t.csv", *LIMITS)
    ended = octavo(*flags)
    assert ended.code == 1 and "t.csv: line 3: column num_prompt: -5 is not allowed" in ended.err
    (tmp_path / "t.csv").write_text("arrival_s,num_prompt,num_output\n0,5,5\n0,5,5\n")
    ended = octavo(*flags)
    assert ended.code == 2 and "--rate" in ended.err and "come at once" in ended.err
    (tmp_path / "t.csv").write_text("arrival_s,num_prompt,num_output\n0,50000,5\n1,50000,5\n")
    ended = octavo(*flags)
    assert ended.code == 1 and "t.csv: no request fits the model's context of 16384 tokens" in ended.err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--slo", "ttft=0"), "--slo"), (("--slo", "itl=1,gap=2"), "every rate keeps it"), (("--slo", "speed=1"), "--slo"), ((), "--slo"),
        ((*LIMITS, "--context", "5"), "--context"),
        ((*LIMITS, "--sequences", "5"), "--sequences"), ((*LIMITS, "--memory", "1G"), "--memory"), (("--fit", *LIMITS), "--slo"),
        (("--fit", "--rate", "1"), "--rate"), (("--fit", "--block-size", "8"), "--block-size"), (("--fit", "--context", "0"), "--context"),
        ((*LIMITS, "--attainment", "0"), "--attainment"), ((*LIMITS, "--attainment", "nan"), "--attainment"),
        ((*LIMITS, "--rate", "0"), "--rate"),
        ((*LIMITS, "--rate", "nan"), "--rate"), ((*LIMITS, "--seeds", "1,1"), "--seeds"), ((*LIMITS, "--seeds", "x"), "--seeds"),
        ((*LIMITS, "--seeds", "0,²"), "--seeds"), ((*LIMITS, "--seeds", "9" * 5000), "--seeds"),
        ((*LIMITS, "--rate-range", "5"), "--rate-range"), ((*LIMITS, "--rate-range", "5:2"), "--rate-range"),
        ((*LIMITS, "--precision", "0"), "--precision"), ((*LIMITS, "--budget", "-1"), "--budget"), ((*LIMITS, "--link", "0"), "--link"),
        ((*LIMITS, "--power-budget", "nan"), "--power-budget"), ((*LIMITS, "--machine", "abacus"), "--machine"),
        ((*LIMITS, "--arrivals", "trace"), "--arrivals"), ((*LIMITS, "--prompt-len", "x"), "--prompt-len"),
        ((*LIMITS, "--max-num-seqs", "0"), "--max-num-seqs"), ((*LIMITS, "--max-num-seqs", "600"), "--max-num-batched-tokens"),
        ((*LIMITS, "--minimize", "usd", "--machine", "l4"), "--minimize"),
    ],
)  # fmt: skip
def test_contradictions_are_refused(octavo: Octavo, tiny: Path, flags: tuple[str, ...], message: str) -> None:
    ended = octavo("plan", "-m", tiny, *flags)
    assert ended.code == 2 and message in ended.err and ended.out == ""
