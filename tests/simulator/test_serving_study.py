"""Ways of serving compared: shapes against a family's program, times by hand, the search against trying every rate."""

from __future__ import annotations

import random
from dataclasses import replace
from statistics import median

import pytest

from octavo.core.cost import StepShape
from octavo.costs.program_work import ProgramWork
from octavo.models.families import from_hf
from octavo.simulator.dense_models import LLAMA2_70B, OPT_13B, SMOLLM2_135M, DenseModel
from octavo.simulator.rate_curve import RateBracket, RateCurve, ratio_of
from octavo.simulator.records import Slo
from octavo.simulator.serving_study import Load, Served, ServingStudy, Way, datasheet
from octavo.workload.lengths import Fixed, Uniform
from octavo.workload.requests import Independent, SharedPrefix

SMALL = DenseModel("small", 3, 64, 4, 2, 160, 500, is_gated=True, ties_output=False)


def hf_config(model: DenseModel) -> dict[str, object]:
    return {
        "model_type": "llama", "hidden_size": model.hidden, "num_hidden_layers": model.layers, "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads, "intermediate_size": model.ffn, "vocab_size": model.vocab, "rms_norm_eps": 1e-5,
        "max_position_embeddings": 2048, "rope_theta": 10000.0, "hidden_act": "silu", "tie_word_embeddings": model.ties_output,
    }


def tensor_names(model: DenseModel) -> set[str]:
    parts = [f"self_attn.{name}_proj" for name in "qkvo"] + [f"mlp.{name}_proj" for name in ("gate", "up", "down")]
    parts += ["input_layernorm", "post_attention_layernorm"]
    names = {f"model.layers.{layer}.{part}.weight" for layer in range(model.layers) for part in parts}
    names |= {"model.embed_tokens.weight", "model.norm.weight"}
    return names if model.ties_output else names | {"lm_head.weight"}


@pytest.mark.parametrize("model", [SMALL, SMOLLM2_135M, replace(LLAMA2_70B, layers=2)], ids=lambda model: model.name)
def test_a_shape_counts_what_a_family_s_program_counts(model: DenseModel) -> None:
    program, _ = from_hf(hf_config(model), tensor_names(model))
    ours, theirs = model.work(), ProgramWork.of(program)
    assert ours == theirs
    assert model.kv_bytes_per_token() == program.kv_bytes_per_token(2)
    norms = sum(shape[0] for shape in program.weights.values() if len(shape) == 1)
    assert model.num_params + norms == sum(_size(shape) for shape in program.weights.values())


def _size(shape: tuple[int, ...]) -> int:
    size = 1
    for extent in shape:
        size *= extent
    return size


def test_a_model_without_gates_has_twelve_matrices_of_hidden_size() -> None:
    layers = OPT_13B.num_params - OPT_13B.hidden * OPT_13B.vocab
    assert layers == 12 * OPT_13B.hidden**2 * OPT_13B.layers
    assert OPT_13B.kv_bytes_per_token() == 800 * 1024


# --- the search -------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(30))
def test_a_bracket_is_what_trying_every_rate_finds(seed: int) -> None:
    rng = random.Random(seed)
    knee, ratio, first = 10 ** rng.uniform(-1, 2), rng.uniform(1.02, 1.5), 10 ** rng.uniform(-1, 1)
    limits = [rng.uniform(1.1, 20) for _ in range(3)]

    def latency(rate: float) -> float:
        return 1 / (1 - rate / knee) if rate < knee else float("inf")

    curve = RateCurve(latency, first, ratio)
    for limit in limits:
        holding = max(place for place in range(-300, 300) if latency(curve.rate(place)) <= limit)
        assert curve.bracket(limit) == RateBracket(curve.rate(holding), curve.rate(holding + 1))
    assert curve.points == tuple(sorted(curve.points)) and len(curve.points) == len(curve.found)
    assert max(rate for rate, _ in curve.points) <= max(first, 2 * ratio * knee), "never far into what takes long"


def test_a_limit_that_no_rate_keeps_and_one_that_all_keep() -> None:
    assert RateCurve(lambda rate: 5.0).bracket(4.0).holds_at == 0.0
    with pytest.raises(ValueError, match="rate: .* still holds"):
        RateCurve(lambda rate: 5.0).bracket(6.0)


def test_the_ratio_is_as_wide_as_the_brackets_allow() -> None:
    above, below = [RateBracket(4.0, 5.0), RateBracket(6.0, 7.0)], [RateBracket(2.0, 3.0), RateBracket(3.0, 4.0)]
    assert ratio_of(above, below) == (pytest.approx(4 / 3), pytest.approx(2.0), pytest.approx(2.5))
    assert ratio_of(above[:1], [RateBracket(0.0, 1.0)])[2] == float("inf")


# --- runs -------------------------------------------------------------------------------------------------------------------------------

SERVED = Served(OPT_13B, datasheet("a100-40gb"), 15_728)
LOAD = Load(Independent(Uniform(20, 60), Uniform(5, 20)), 4.0)


def test_seconds_of_prompts_and_decoding() -> None:
    cost = SERVED.cost
    assert SERVED.decode_s(100) == cost.seconds_of(StepShape(1, 1, 1, 100, 100))
    whole = cost.seconds_of(StepShape(1000, 1, 1, 1000, 1000 * 1001 // 2))
    assert SERVED.prefill_s(1000) == whole == SERVED.prefill_s(1000, 1000) == SERVED.prefill_s(1000, 4000)
    first = cost.seconds_of(StepShape(600, 1, 0, 600, 600 * 601 // 2))
    second = cost.seconds_of(StepShape(400, 1, 1, 1000, 400 * 600 + 400 * 401 // 2))
    assert SERVED.prefill_s(1000, 600) == pytest.approx(first + second, rel=1e-12)


def test_the_room_that_weights_leave() -> None:
    served = Served.fitting(OPT_13B, datasheet("a100-40gb", 2))
    assert served.num_slots == int((0.9 * 80e9 - 2 * OPT_13B.num_params) // OPT_13B.kv_bytes_per_token())
    with pytest.raises(ValueError, match="machine: 'l4' is not allowed; the weights of OPT-13B leave no room"):
        Served.fitting(OPT_13B, datasheet("l4"))


def test_requests_of_a_seed_are_the_same_at_every_rate() -> None:
    slow, fast = list(LOAD.requests(2.0, 3)), list(LOAD.requests(8.0, 3))
    assert len(slow) < len(fast) and all(request.arrival_s < 4.0 for request in fast)
    assert [request.prompt_token_ids for request in slow] == [request.prompt_token_ids for request in fast[: len(slow)]]


def test_one_request_alone_takes_its_steps() -> None:
    study = ServingStudy(SERVED, Load(Independent(Fixed(100), Fixed(10)), 1e9))
    (record,) = study.run(Way.of("paged"), 1.0, 0, num_requests=1).records
    decode_s = sum(SERVED.decode_s(length) for length in range(101, 110))
    assert record.e2e_s == pytest.approx(SERVED.prefill_s(100) + decode_s, rel=1e-9)


def test_what_is_left_behind_makes_the_latency_infinite() -> None:
    study = ServingStudy(SERVED, LOAD)
    assert study.latency(Way.of("paged"), 0).measure(4.0) < 0.1
    assert study.latency(Way.of("static", "max", "static", 1), 0).measure(64.0) == float("inf")


def test_reservations_hold_less_than_pages() -> None:
    served = replace(SERVED, num_slots=1600, max_model_len=512)
    study = ServingStudy(served, Load(Independent(Uniform(20, 60), Uniform(5, 40)), 4.0), first=25.0)
    paged, oracle, most = (study.latency(Way.of(name, name), 0).at(0) for name in ("paged", "oracle", "max"))
    assert paged < oracle < most
    assert study.num_runs == 3 and study.latency(Way.of("paged"), 0).points == ((25.0, paged),), "each rate of each way is run once"


def test_goodput_counts_both_limits() -> None:
    study = ServingStudy(SERVED, LOAD, first=20.0)
    records = study.run(Way.of("paged"), 20.0, 0).records
    ttft_s, itl_s = (median(getattr(record, name) for record in records) for name in ("ttft_s", "itl_s"))
    limits = (Slo(ttft_s=9.0, itl_s=9.0), Slo(ttft_s=ttft_s), Slo(itl_s=itl_s), Slo(ttft_s=ttft_s, itl_s=itl_s))
    none, late, slow, either = (study.misses(Way.of("paged"), 0, slo).at(0) for slo in limits)
    assert none == 0.0 and late == pytest.approx(0.5, abs=0.02) == slow and max(late, slow) < either <= late + slow
    coarse = ServingStudy(SERVED, LOAD, first=2.0, ratio=1e6)
    coarse.misses(Way.of("paged"), 0, limits[1]).found.update({0: 0.1, 1: 0.11})
    assert coarse.goodput(Way.of("paged"), limits[1]) == [RateBracket(2.0, 2e6)], "a tenth may miss its limits"


def test_engines_apart_hand_over() -> None:
    study = ServingStudy(SERVED, LOAD)
    way = Way.of("apart", chunked=False).apart(1, 2)
    assert (way.name, way.num_devices) == ("apart 1P+2D", 3)
    report = study.run(way, 6.0, 0)
    assert report.num_completed == report.num_arrived == report.num_handed_over > 5
    assert [engine.role for engine in report.engines] == ["prefill", "decode", "decode"]
    together = Way.of("together").with_engines(3)
    assert together.num_devices == 3 and len(study.run(together, 6.0, 0).engines) == 3


def test_a_shared_prefix_is_computed_once() -> None:
    study = ServingStudy(SERVED, Load(LOAD.lengths, 4.0, SharedPrefix(320)))
    kept, copied = (study.run(Way.of("paged", prefix_cache=cached), 6.0, 0) for cached in (True, False))
    assert kept.cached_tokens >= 320 * (kept.num_completed - 2) and copied.cached_tokens == 0
