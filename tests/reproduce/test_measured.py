"""Figures measured on the engine: each runs on a tiny model with a load of a few requests, where only its make-up is tested; verdicts are
tested on made-up measurements. No verdict depends on how fast anything is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from octavo.bench.in_process import Engines
from octavo.bench.limits import Limits, PeakProbe, ReadProbe
from octavo.bench.ngram_alpha import Alpha, AlphaCase
from octavo.bench.preemption import PreemptionCase
from octavo.bench.spec import Gain
from octavo.reproduce import (
    bigram_gain,
    block_size,
    chunk_overhead_measured,
    chunked_prefill,
    draft_gains,
    draft_lengths,
    kv_use_measured,
    measured,
    ngram_alpha,
    orca_equal_measured,
    orca_mixed_measured,
    paged_rates_measured,
    prefix_rates_measured,
    recompute_or_swap,
    sharing_alpaca,
    sharing_measured,
    sharing_sharegpt,
    tiled_attention,
)
from octavo.reproduce.draft_gains import Draft
from octavo.reproduce.draft_lengths import Point
from octavo.reproduce.drafted_work import DraftedWork
from octavo.reproduce.figure import MEASURED, Figure
from octavo.reproduce.kv_use_measured import Use
from octavo.reproduce.orca_equal_measured import LONG, MIXED, SHORT, Gap
from octavo.reproduce.registry import ENTRIES
from octavo.reproduce.setup import Setup
from octavo.workload.requests import TokenRange, WorkloadRequest
from tests.models.tiny import write_tiny_gguf

TOKENS = TokenRange(3, 500)
PEAKS = [PeakProbe(kind, "", 1, rate, 1.0) for kind, rate in (("int8", 4e11), ("bf16", 2e11))]
LIMITS = Limits(1, 512, [ReadProbe("memory", 1, 1, 0, True, 1, 3e10, 1.0)], PEAKS)
LENGTHS = sharing_measured.Case("alpaca", 3, (2, 3), 256)
CASES = {  # module -> cases of its own that take next to no time
    orca_mixed_measured: orca_mixed_measured.Case(3, (2,), (0.5, 2.0), 120),
    orca_equal_measured: orca_equal_measured.Case({1: {MIXED: 1, LONG: 1, SHORT: 2}, 2: {MIXED: 2, LONG: 2, SHORT: 3}}, 1, 120),
    kv_use_measured: kv_use_measured.Case(60, 16),
    paged_rates_measured: paged_rates_measured.Case(6, 16, (0.5, 2.0)),
    sharing_alpaca: LENGTHS,
    sharing_sharegpt: replace(LENGTHS, dataset="sharegpt", num_requests=1, num_kv_blocks=512),
    prefix_rates_measured: prefix_rates_measured.Case(3, 2, 5, 3, num_kv_blocks=128),
    block_size: block_size.Case({"alpaca": block_size.Load(6, 1, 256), "sharegpt": block_size.Load(3, 16, 256)}, 1, (16, 64)),
    recompute_or_swap: recompute_or_swap.Case(PreemptionCase(6, 20, 60, 0.4, (16,), 1), 40, (16, 32)),
    draft_gains: draft_gains.Case(1, 6, 1, self_draft_layers=1),
    ngram_alpha: AlphaCase(6, 2, 4, 8),
    bigram_gain: bigram_gain.Case(("stories",), 8, 1),
    draft_lengths: draft_lengths.Case(6, 1, ks=(1, 3), num_prompts=2, self_draft_layers=1),
    tiled_attention: tiled_attention.Case((40, 70), (64, 128), 1, ("f32",), 0.001),
    chunked_prefill: chunked_prefill.Case(4, 1, 40, 8, 120, 32, 0.8, 4, 120),
    chunk_overhead_measured: chunk_overhead_measured.Case(160, (16, 64, 512), 1),
}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_gguf(tmp_path_factory.mktemp("models") / "rand.gguf", context=2048)


def hits(figure: Figure) -> dict[str, bool | None]:
    return {row.what: row.hit for row in figure.rows}


@pytest.mark.parametrize("module", CASES, ids=lambda module: module.NAME)
def test_a_figure_of_a_tiny_model(module: object, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measured, "measure_limits", lambda threads, budget_s: LIMITS)
    monkeypatch.setattr(tiled_attention, "measure_limits", lambda threads, budget_s: LIMITS)
    monkeypatch.setattr(module, "QUICK", CASES[module])  # type: ignore[index]
    (entry,) = [one for one in ENTRIES if one.name == module.NAME]  # type: ignore[attr-defined]
    (figure,) = entry.run(Setup(model=str(path), seed=1, quick=True))
    assert (figure.number, figure.evidence) == (entry.number, entry.evidence) and entry.evidence == MEASURED
    assert "The machine reads 30 GB/s and computes int8 0.40 TOP/s, bf16 0.20 TOP/s." in figure.setup
    assert ("seed" in figure.setup or module in (draft_gains, bigram_gain, draft_lengths, tiled_attention))
    assert len(hits(figure)) == len(figure.rows) > 2 and figure.plots
    assert any(row.hit is not None for row in figure.rows)
    assert all(line.points for plot in figure.plots for line in plot.lines)
    assert figure.to_text()


# --- loads ------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "load",
    [
        lambda seed: orca_mixed_measured.requests(2.0, 8, orca_mixed_measured.LENGTHS, TOKENS, seed),
        lambda seed: kv_use_measured.requests(kv_use_measured.ClosedLoop(8), 8, 4, TOKENS, seed),
        lambda seed: prefix_rates_measured.requests(range(900), prefix_rates_measured.QUICK, 80, seed),
        lambda seed: block_size.requests("alpaca", block_size.Load(8, 1, 512), TOKENS, seed),
        lambda seed: chunked_prefill.requests(3.0, chunked_prefill.QUICK, TOKENS, seed),
    ],
)
def test_loads_follow_from_the_seed(load: Callable[[int], object]) -> None:
    first = list(load(5))  # type: ignore[call-overload]
    assert first == list(load(5)) != list(load(6))  # type: ignore[call-overload]
    assert all(isinstance(one, WorkloadRequest) and one.prompt_token_ids and one.num_output >= 1 for one in first)


def test_lengths_of_the_traces() -> None:
    mixed = list(orca_mixed_measured.requests(None, 400, orca_mixed_measured.LENGTHS, TOKENS, 0))
    prompts, outputs = [len(one.prompt_token_ids) for one in mixed], [one.num_output for one in mixed]
    assert (min(prompts) >= 32, max(prompts) <= 512, min(outputs) >= 1, max(outputs) <= 128) == (True,) * 4
    assert sum(prompts) / 400 == pytest.approx(272, rel=0.06) and sum(outputs) / 400 == pytest.approx(64.5, rel=0.06)
    divided = list(kv_use_measured.requests(kv_use_measured.ClosedLoop(2000), 2000, 2, TOKENS, 0))
    assert sum(len(one.prompt_token_ids) for one in divided) / 2000 == pytest.approx(161.31 / 2, rel=0.06)
    assert sum(one.num_output for one in divided) / 2000 == pytest.approx(337.99 / 2, rel=0.06)


def test_spreads_of_prompts_and_answers_are_the_published_ones() -> None:
    lengths = chunked_prefill.FULL.lengths
    for found, median, p90 in ((lengths.prompt, 512, 5696 / 1730), (lengths.output, 96, 834 / 415)):
        assert found.quantile(0.5) == median  # type: ignore[attr-defined]
        assert found.quantile(0.9) / median == pytest.approx(p90, rel=0.01)  # type: ignore[attr-defined]


def test_a_prefix_is_common_and_what_follows_is_not() -> None:
    load = list(prefix_rates_measured.requests(range(900), prefix_rates_measured.Case(5, 1, 7, 3), 80, 2))
    assert {tuple(one.prompt_token_ids[:80]) for one in load} == {tuple(range(160, 240))}
    assert len({one.prompt_token_ids[80] for one in load}) == 5 and all(len(one.prompt_token_ids) == 87 for one in load)


def test_a_load_that_begins_with_a_full_batch() -> None:
    load = [WorkloadRequest(float(i), [i], 1) for i in range(1, 6)]
    begun = orca_equal_measured.begun(load, 3)
    assert [one.arrival_s for one in begun] == [0, 0, 0, 1, 2] and [one.prompt_token_ids for one in begun] == [[i] for i in range(1, 6)]
    assert [one.arrival_s for one in orca_equal_measured.begun(load, 9)] == [0] * 5


# --- verdicts ---------------------------------------------------------------------------------------------------------------------------

Seconds = tuple[float, float, float]
FLAT, STEEP = ((1.0, 1.0), (2.0, 1.0), (4.0, 1.0)), ((1.0, 1.0), (2.0, 3.0), (4.0, 9.0))


@pytest.mark.parametrize(
    ("ours", "other", "expected"),
    [
        (FLAT, STEEP, ("2.67x", True)),  # STEEP keeps 2 up to 1.5
        (STEEP, FLAT, ("0.38x", False)),
        (FLAT, FLAT, ("both keep it at every rate", None)),
        (FLAT, ((1.0, 5.0), (2.0, 6.0), (4.0, 7.0)), ("above 4.00x", True)),
        (((1.0, 5.0), (2.0, 6.0), (4.0, 7.0)), FLAT, ("below 0.25x", False)),
        (((1.0, 5.0),), ((1.0, 6.0),), ("neither keeps it", None)),
    ],
)
def test_ratios_of_rates(ours: measured.Curve, other: measured.Curve, expected: tuple[str, bool | None]) -> None:
    assert measured.rate_ratio(ours, other, 2.0) == expected


def test_curves_come_from_the_same_requests_at_each_rate(path: Path) -> None:
    asked = list[float]()

    def at(rate: float) -> list[WorkloadRequest]:
        asked.append(rate)
        return [WorkloadRequest(i / rate, [5 + i], 2) for i in range(3)]

    with Engines(str(path), {"a": {"num_kv_blocks": 16}, "b": {"num_kv_blocks": 16}}) as two:
        curves = measured.measure_curves(two.by_name, (1.0, 4.0), at, lambda run: run.records[-1].due_s)
    assert curves == {name: ((1.0, 2.0), (4.0, 0.5)) for name in "ab"} and asked == [1.0, 1.0, 4.0, 4.0]


@pytest.mark.parametrize(("good", "curve"), [(True, STEEP), (False, FLAT)])
def test_orca_mixed(good: bool, curve: measured.Curve) -> None:
    other = FLAT if good else STEEP
    curves = {orca_mixed_measured.ITERATION: other, orca_mixed_measured.REQUEST: curve, orca_mixed_measured.ALONE: curve}
    capacity = {(way, 4): value for way, value in (("iteration-level", 2.0), ("request-level", 1.0 if good else 3.0))}
    found = hits(orca_mixed_measured.shown(orca_mixed_measured.Curves(capacity, dict.fromkeys(curves, 4), curves), "made up"))
    assert found["rate at 2x the latency of the lowest rate, iteration- over request-level"] is good
    assert found["latency per token at the highest rate"] is good
    assert found["requests per second, all there at once (at most 4 and 4 at once)"] is good


def test_orca_equal() -> None:
    def figure(mixed: float, equal: float, alone: float, steps: tuple[int, int]) -> dict[str, bool | None]:
        gaps = {(8, name): Gap(ratio, ratio, ratio, (5, 9)) for name, ratio in ((MIXED, mixed), (LONG, equal), (SHORT, equal))}
        gaps |= {(1, name): Gap(alone, alone, alone, steps) for name in (MIXED, LONG, SHORT)}
        return hits(orca_equal_measured.shown(gaps, "made up"))

    good = figure(1.5, 1.1, 1.02, (7, 7))
    assert good["all 256 + 256, at most 8 at once"] is good["all 32 + 1, at most 8 at once"] is good["mixed lengths, one at a time"] is True
    bad = figure(1.1, 1.5, 1.02, (7, 8))
    assert bad["all 256 + 256, at most 8 at once"] is bad["mixed lengths, one at a time"] is False
    assert figure(1.5, 1.1, 1.2, (7, 7))["mixed lengths, one at a time"] is False


def test_kv_use() -> None:
    paper = {way: Use(9, *(part or 0.0 for part in kv_use_measured.PAPER[way][0]), 8.0) for way in kv_use_measured.NAMES}
    good = kv_use_measured.shown(paper, "made up")
    assert good.num_misses == 0 and hits(good)["order"] is True
    other = kv_use_measured.shown(paper | {"paged": replace(paper["paged"], token_states=96.3 - 3.1)}, "made up")
    assert [row.what for row in other.rows if row.hit is False] == ["paged: token states"]
    assert hits(kv_use_measured.shown(paper | {"paged": replace(paper["paged"], token_states=38.0)}, "made up"))["order"] is False


def test_paged_rates() -> None:
    names = (paged_rates_measured.PAGED, paged_rates_measured.ORACLE, paged_rates_measured.MAX, paged_rates_measured.FT)
    curves = {name: tuple((rate, 1.0 + i * rate) for rate in (1.0, 2.0, 4.0)) for i, name in enumerate(names)}
    good = paged_rates_measured.shown(paged_rates_measured.Curves(4.0, curves), "made up")
    assert good.num_misses == 0 and [row.hit for row in good.rows[-2:]] == [True, True]
    worse = curves | {names[1]: (*FLAT[:1], (4.0, 0.5)), names[0]: STEEP}
    bad = paged_rates_measured.shown(paged_rates_measured.Curves(4.0, worse), "made up")
    assert hits(bad)["latency per token at the highest rate"] is False and bad.num_misses > 1


@pytest.mark.parametrize(
    ("published", "ours", "expected"),
    [("6.09", 6.69, True), ("6.09", 6.71, False), ("6.09", 5.4, False), ("16-30", 16.0, True), ("16-30", 30.1, False), ("-", 5.0, None)],
)
def test_a_published_share_of_blocks(published: str, ours: float, expected: bool | None) -> None:
    assert sharing_measured.agrees(published, ours) is expected


def test_sharing() -> None:
    saved = {("samples", 2): 6.1, ("samples", 4): 8.5, ("beams", 2): 37.6, ("beams", 4): 53.1}
    assert sharing_measured.shown(saved, "made up", "alpaca", 9).num_misses == 0
    found = hits(sharing_measured.shown(saved | {("beams", 4): 8.4, ("samples", 4): 6.1}, "made up", "alpaca", 9))
    assert found["beams: a wider request saves more"] is found["samples: a wider request saves more"] is False
    assert found["beams save more than samples"] is True  # at both widths, if only by a little
    assert hits(sharing_measured.shown(saved | {("beams", 2): 6.0}, "made up", "alpaca", 9))["beams save more than samples"] is False


def test_prefixes() -> None:
    def figure(short: float, long: float) -> dict[str, bool | None]:
        ratios = {(p, other): [value] for p, value in ((80, short), (341, long)) for other in ("no prefix cache", "Orca (Oracle)-like")}
        return hits(prefix_rates_measured.shown(prefix_rates_measured.Gains(ratios, {80: 0.6, 341: 0.9}), "made up"))

    assert [hit for hit in figure(1.5, 3.0).values() if hit is not None] == [True] * 4
    assert figure(3.0, 1.5)["a longer prefix gains more over no prefix cache"] is False
    assert figure(0.9, 1.5)["sharing is faster than no prefix cache"] is False


def test_block_sizes() -> None:
    def figure(speeds: dict[int, list[float]]) -> dict[str, bool | None]:
        return hits(block_size.shown({"sharegpt": speeds}, "made up"))

    good = figure({16: [9.0, 9.2, 1.0], 64: [9.1], 256: [5.0]})
    assert good["best size, lengths of sharegpt"] is good["sharegpt: blocks of 256 against the best"] is True
    bad = figure({16: [9.0], 64: [9.1], 256: [9.5]})
    assert bad["best size, lengths of sharegpt"] is bad["sharegpt: blocks of 256 against the best"] is False


def test_recompute_or_swap() -> None:
    def figure(swap: Seconds, recompute: Seconds = (4, 4, 4), ratio: float = 1.1, num: int = 5) -> dict[str, bool | None]:
        seconds = dict(zip((16, 32, 256), zip(recompute, swap, strict=True), strict=True))
        return hits(recompute_or_swap.shown(recompute_or_swap.Restores("m", 1, seconds, {16: [ratio]}, {16: num}), "made up", 512))

    flat, dear = "recomputing costs the same with every block size", "swapping costs more in blocks of 16 than of 256"
    cheaper, whole = "cheaper way, one sequence", "whole load, blocks of 16: throughput of swapping over recomputing"
    assert figure((9, 2, 1)) == {flat: True, dear: True, cheaper: True, whole: True}
    assert figure((3, 2, 1))[cheaper] is False and figure((9, 9, 1))[cheaper] is False and figure((9, 2, 9))[cheaper] is False
    assert figure((9, 9, 9))[cheaper] is figure((9, 9, 9))[dear] is False
    assert figure((9, 2, 1), (4, 4, 5.1))[flat] is False
    assert figure((9, 2, 1), ratio=1.3)[whole] is False and figure((9, 2, 1), ratio=1.3, num=0)[whole] is None


def test_the_formula_of_gains() -> None:
    assert Gain(5, 0.8, 0.0, 1.0, 1.0, 0.0).predicted == pytest.approx(3.69, abs=0.005)  # table 1 of the paper
    assert Gain(7, 0.75, 0.02, 1.0, 1.0, 0.0).predicted == pytest.approx(3.16, abs=0.005)  # table 4
    assert Gain(3, 1.0, 0.1, 1.5, 1.0, 0.0).predicted == pytest.approx(4 / 1.8)
    assert Gain(3, 0.2, 0.1, 1.2, 0.5, 0.0).predicted == pytest.approx((0.5 * 1.248 + 0.5) / (1.2 + 0.15))


def test_draft_gains() -> None:
    best, worst = Draft("edit", "ngram", 0.0, 5, "summaries"), Draft("code", "self", 1.0, 3, "translation")
    gains = {best: Gain(5, 0.8, 0.0, 1.0, 1.0, 3.2), worst: Gain(3, 0.3, 0.9, 1.3, 1.0, 0.36)}
    assert draft_gains.shown(gains, "made up").num_misses == 0
    found = hits(draft_gains.shown(gains | {best: replace(gains[best], measured=3.0)}, "made up"))
    assert found[str(best)] is False and found[str(worst)] is True
    turned = hits(draft_gains.shown(gains | {best: replace(gains[best], measured=0.2)}, "made up"))
    assert turned["what is predicted best and worst is so"] is False


def test_ngram_alphas() -> None:
    assert ngram_alpha.shown([Alpha(0.0, (0.03, 0.05, 0.06), 9, 9)], "made up").num_misses == 0
    found = hits(ngram_alpha.shown([Alpha(1.0, (0.07, 0.24), 9, 9), Alpha(0.0, (0.06, 0.05), 9, 9)], "made up"))
    assert (found["unigram, T = 1"], found["bigram, T = 1"], found["unigram, T = 0"]) == (False, False, True)
    assert found["a bigram drafts better than a unigram, T = 1"] is True and found["a bigram drafts better than a unigram, T = 0"] is False
    assert found["a bigram is a poor draft, T = 1"] is False


def test_bigram_gains() -> None:
    good = bigram_gain.shown({0.0: Gain(3, 0.2, 0.0, 1.1, 1.0, 1.13)}, "made up")
    assert good.num_misses == 0 and good.rows[1].ours == good.rows[1].published == "1.25x"
    found = hits(bigram_gain.shown({0.0: Gain(3, 0.2, 0.0, 1.1, 1.0, 0.9)}, "made up"))
    assert found["gain measured, T = 0"] is found["even a bigram gains, T = 0"] is False


def test_draft_lengths() -> None:
    work = DraftedWork("json", "ngram", 0.0)

    def figure(*points: tuple[float, float, float, float]) -> dict[str, bool | None]:
        by_k = zip((0, 1, 3, 6), points, strict=True)
        sweep = {k: Point((mean - spread, mean + spread), kept, loop) for k, (mean, spread, kept, loop) in by_k}
        return hits(draft_lengths.shown({work: sweep}, "made up"))

    good = figure((10, 0, 1, 10), (6, 0.5, 0.9, 11), (5, 0.5, 0.6, 13), (7, 1.0, 0.3, 19))
    assert [hit for hit in good.values() if hit is not None] == [True] * 4
    bad = figure((10, 0, 1, 10), (7, 0.9, 0.6, 13), (6, 0.5, 0.7, 12), (5, 0.1, 0.5, 11))
    assert [hit for hit in bad.values() if hit is not None] == [False] * 4


def test_tiled_attention() -> None:
    from octavo.bench.attention_whole import WholePrompt

    whole = [WholePrompt(512, 1e-7, True, None, 0, 1.0, 4.0), WholePrompt(1024, 3e-7, True, None, 0, 1.0, 6.0)]

    def figure(memory: dict[int, int | None], whole: list[WholePrompt] = whole) -> dict[str, bool | None]:
        return hits(tiled_attention.shown(tiled_attention.Found(whole, memory, []), "made up", 9))

    good = figure({1000: 6_000_000, 4000: 25_000_000})
    assert len(good) == 5 and set(good.values()) == {True}
    assert figure({1000: 6_000_000, 4000: 90_000_000})["memory, 1000 to 4000 tokens"] is False
    assert figure({1000: None, 4000: None})["memory, 1000 to 4000 tokens"] is None
    bad = figure({1000: 6_000_000, 4000: 25_000_000}, [replace(whole[0], error=2e-5, same_in_pieces=False, scores_s=0.5)])
    assert [bad[what] for what in ("difference to exact attention", "a prompt in pieces gives the same bits")] == [False, False]
    assert bad["over scores in memory, 512 tokens"] is False


def test_chunks() -> None:
    def figure(both: tuple[float, float], hybrid: tuple[float, float]) -> list[bool]:
        pairs = (("both", both), ("hybrid batching only", hybrid))
        cells = {name: chunked_prefill.Cell([ttft], [gap], [gap]) for name, (ttft, gap) in pairs}
        return [row.hit for row in chunked_prefill.shown(cells, "made up").rows if row.hit is not None]

    assert figure((0.76, 0.14), (0.53, 0.68)) == [True, True, True]
    assert figure((0.5, 0.7), (0.53, 0.68)) == [False, False, False]


def test_the_cost_of_chunks() -> None:
    good = chunk_overhead_measured.shown({64: 1.6, 512: 1.2, 2048: 1.04, 4096: 1.0}, "made up")
    assert [row.hit for row in good.rows] == [None, None, True, True, True]
    bad = chunk_overhead_measured.shown({64: 1.2, 512: 1.3, 2048: 1.1, 4096: 1.0}, "made up")
    assert [row.hit for row in bad.rows] == [None, None, False, False, False]
