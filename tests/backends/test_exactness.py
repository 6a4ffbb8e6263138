"""The exactness matrix: a token's logits depend on the tokens before it and on nothing else, to the bit, on every kernel path.

Each configuration is compared with the plain run: alone, whole prompt in one chunk, one thread, blocks of 16, no prefix cache.
"""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import pytest

from octavo.core import policy
from octavo.core.request import SamplingParams
from octavo.models.loaded import LoadedModel
from tests.backends.exactness import GREEDY, Run, Setup, fixture_model, guesses_of, of, quantised, random_prompts

PLAIN = Setup(threads=1)
# Around tiles of 16 and 64 tokens, splits of 256, the tiny model's window, and rows of a matrix tile.
LENGTHS = (1, 7, 8, 9, 12, 13, 15, 16, 17, 31, 33, 63, 64, 65, 127, 129, 255, 256, 257, 300, 511, 513)
LONG = (2049, 2100)
STEPS = 4

CONFIGURATIONS = {
    "two-threads": Setup(),
    "three-threads": Setup(threads=3),
    "blocks-of-32": Setup(block_size=32, num_blocks=1024),
    "chunks-of-64": Setup(chunk=64),
    "chunks-of-7": Setup(chunk=7),
    "chunks-of-1": Setup(chunk=1),
    "batch-of-16": Setup(max_num_seqs=16, chunk=512),
    "batch-small-chunks": Setup(max_num_seqs=16, chunk=24),
}


def run(model: LoadedModel, setup: Setup, prompts: dict[str, list[int]], num_output: int = STEPS) -> Run:
    """All prompts; one after the other when the setup runs one sequence at a time."""
    r = Run(model, setup)
    try:
        return r.batch(prompts, num_output)
    finally:
        r.close()


def assert_same(plain: Run, other: Run, names: list[str]) -> None:
    for name in names:
        want, got = of(plain.logits, name), of(other.logits, name)
        assert len(want) >= STEPS
        wrong = [p for p, digest in want.items() if got.get(p) != digest]
        assert not wrong, f"{name}: logits differ at positions {wrong[:5]}"
        assert plain.tokens[name] == other.tokens[name]


def preempted(model: LoadedModel, prompts: dict[str, list[int]], num_output: int) -> Run:
    """Together in a pool that holds about half of them."""
    need = [-(-(len(p) + num_output) // 16) for p in prompts.values()]
    with mock.patch.object(policy, "expected_growth", lambda *_: 0):  # admission as careless as can be
        r = run(model, Setup(max_num_seqs=16, chunk=128, num_blocks=max(max(need) + 1, sum(need) // 2)), prompts, num_output)
    assert r.scheduler.stats.num_preemptions > 0
    return r


def prefix_hit(model: LoadedModel, prompts: dict[str, list[int]], setup: Setup) -> Run:
    """Each prompt a second time, after the first has left its blocks in the cache."""
    r = Run(model, setup)
    try:
        r.batch({f"warm-{n}": ids for n, ids in prompts.items()}, 1)
        r.batch(prompts, STEPS)
    finally:
        r.close()
    assert all(r.cached[n] == (len(ids) - 1) // setup.block_size * setup.block_size for n, ids in prompts.items())
    return r


def partial_hit(model: LoadedModel, prompts: dict[str, list[int]], setup: Setup) -> Run:
    """Each prompt behind another one that begins with two thirds of it: all but whole blocks is copied, and written on."""
    r = Run(model, replace(setup, prefix_caching=True, granularity="token"))
    cuts = {n: len(ids) - len(ids) // 3 for n, ids in prompts.items()}
    other = {n: [(t + 1) % model.program.vocab_size for t in ids] for n, ids in prompts.items()}
    try:
        r.batch({f"warm-{n}": ids[: cuts[n]] + other[n][cuts[n] :] for n, ids in prompts.items()}, 3)
        r.batch(prompts, STEPS)
    finally:
        r.close()
    assert {n: r.cached[n] for n in prompts} == {n: min(cut, len(prompts[n]) - 1) for n, cut in cuts.items()}
    assert r.scheduler.stats.num_tail_copies >= len(prompts) // 2
    return r


def tiny_gemma3() -> LoadedModel:
    return quantised(fixture_model("gemma3"), ("q4_1", "q8_0", "q5_0", "q4_0", "q5_1"))


@pytest.fixture(scope="module")
def plain_runs() -> dict[tuple, Run]:
    return {}


class TestTinyGemma3:
    """Sliding windows, q/k norms, post norms; matrices in five quantised formats."""

    @pytest.fixture(scope="class")
    @classmethod
    def model(cls) -> LoadedModel:
        return tiny_gemma3()

    @pytest.fixture
    def plain(self, model: LoadedModel, isa: str, plain_runs: dict) -> Run:
        if ("gemma3", isa) not in plain_runs:
            plain_runs["gemma3", isa] = run(model, PLAIN, random_prompts(LENGTHS + LONG, model.program.vocab_size))
        return plain_runs["gemma3", isa]

    @pytest.mark.parametrize("name", CONFIGURATIONS)
    def test_configuration(self, model: LoadedModel, plain: Run, name: str) -> None:
        lengths = LENGTHS if name == "chunks-of-1" else LENGTHS + LONG
        prompts = random_prompts(LENGTHS + LONG, model.program.vocab_size)
        chosen = {f"len-{n}": prompts[f"len-{n}"] for n in lengths}
        assert_same(plain, run(model, CONFIGURATIONS[name], chosen), list(chosen))

    @pytest.mark.parametrize("block_size", [16, 32])
    def test_prefix_hit(self, model: LoadedModel, plain: Run, block_size: int) -> None:
        prompts = random_prompts(LENGTHS + LONG, model.program.vocab_size)
        assert_same(plain, prefix_hit(model, prompts, Setup(prefix_caching=True, block_size=block_size)), list(prompts))

    @pytest.mark.parametrize("setup", [Setup(), Setup(block_size=32, max_num_seqs=16, chunk=24)], ids=["alone", "batch-blocks-of-32"])
    def test_partial_hit(self, model: LoadedModel, plain: Run, setup: Setup) -> None:
        prompts = random_prompts(LENGTHS + LONG, model.program.vocab_size)
        assert_same(plain, partial_hit(model, prompts, setup), list(prompts))

    @pytest.mark.parametrize("kv_dtype", ["f16", "int8", "f32"])
    def test_other_kv_types(self, model: LoadedModel, isa: str, kv_dtype: str) -> None:
        """The rest of the matrix has the default; each type has products and a layout of its own."""
        prompts = {n: ids for n, ids in random_prompts(LENGTHS, model.program.vocab_size).items() if len(ids) in (1, 17, 63, 65, 257, 300)}
        plain = run(model, replace(PLAIN, kv_dtype=kv_dtype), prompts)
        for setup in (Setup(threads=3, chunk=7), Setup(block_size=32, num_blocks=1024, max_num_seqs=16, chunk=24)):
            assert_same(plain, run(model, replace(setup, kv_dtype=kv_dtype), prompts), list(prompts))
        hit = {n: ids for n, ids in prompts.items() if len(ids) > 16}
        assert_same(plain, prefix_hit(model, hit, Setup(prefix_caching=True, kv_dtype=kv_dtype)), list(hit))
        assert_same(plain, partial_hit(model, hit, Setup(kv_dtype=kv_dtype)), list(hit))

    @pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
    @pytest.mark.parametrize("batch", [1, 6])
    def test_drafts(self, model: LoadedModel, isa: str, batch: int, sampled: bool) -> None:
        """What drafts come true, and what is drawn behind them: logits, tokens and log-probabilities of the run without."""
        lengths, num_output = (1, 15, 62, 63, 254, 509), 24
        prompts = random_prompts(lengths, model.program.vocab_size)
        params = GREEDY
        if sampled:
            params = SamplingParams(temperature=0.9, top_p=0.95, frequency_penalty=0.7, repetition_penalty=1.2, logprobs=2)
        plain = Run(model, PLAIN)
        plain.batch(prompts, num_output, params)
        plain.close()
        for most, hit in ((4, 0.7), (9, 1.0), (3, 0.0)):
            r = Run(model, Setup(threads=2, max_num_seqs=batch, chunk=256))
            r.guess = guesses_of(plain.tokens, most, hit, model.program.vocab_size)
            r.batch(prompts, num_output, params)
            r.close()
            assert_same(plain, r, list(prompts))
            assert plain.logprobs == r.logprobs
            stats = r.scheduler.stats
            assert (stats.num_accepted_tokens > 0) == (hit > 0) and (stats.num_accepted_tokens < stats.num_draft_tokens) == (hit < 1)

    @pytest.mark.parametrize("block_size", [16, 32])
    @pytest.mark.parametrize("threads", [1, 2])
    def test_decoding_behind_a_shared_prefix(self, model: LoadedModel, threads: int, block_size: int) -> None:
        """Sequences beside each other that begin in the same blocks attend to them together; some decode across a split's end."""
        prompts = random_prompts((1030, 40, 300), model.program.vocab_size)
        long, own, other = prompts.values()
        alike = {f"own-{n}": long[:800] + own[:n] for n in (1, 2, 15, 16, 17, 31, 33, 40)}
        ends = {f"cut-{n}": long[:n] for n in (500, 505, 511, 512, 513, 767, 768, 1023, 1024, 1030)}
        apart = {"other": other, "later": long[:300] + other, "later-too": long[:300] + other[:-1]}
        prompts = {"first": long, **alike, "alone": other[:7], **ends, **apart}
        plain = run(model, PLAIN, prompts, 12)
        r = Run(model, Setup(threads, block_size, chunk=256, max_num_seqs=32, prefix_caching=True))
        try:
            r.batch({"warm": long + [0]}, 1)
            together = r.batch(prompts, 12)
        finally:
            r.close()
        assert sum(together.cached[name] >= 256 for name in prompts) > 16
        for name in prompts:
            got = of(together.logits, name)
            assert got == {position: digest for position, digest in of(plain.logits, name).items() if position in got}
            assert together.tokens[name] == plain.tokens[name]

    def test_preemption(self, model: LoadedModel, plain: Run, isa: str) -> None:
        prompts = {n: ids for n, ids in random_prompts(LENGTHS + LONG, model.program.vocab_size).items() if 15 <= len(ids) <= 300}
        steps = 40
        want = run(model, PLAIN, prompts, steps)
        assert_same(want, preempted(model, prompts, steps), list(prompts))


@pytest.mark.model
class TestSmolLM2:
    """The real model: packed Q4_1 and Q8_0, grouped-query attention."""

    # On slow paths the lengths are fewer; the kernels are the same code as above.
    LENGTHS = {"avx512_bf16": (1, 12, 13, 16, 17, 64, 65, 257), "avx512_vnni": (13, 17, 65), "avx2": (13, 17, 65), "portable": (17,)}

    @pytest.fixture(scope="class")
    @classmethod
    def model(cls, smollm2_path) -> LoadedModel:
        from octavo.models.loading import load_model

        return load_model(smollm2_path)

    @pytest.fixture
    def prompts(self, model: LoadedModel, isa: str) -> dict[str, list[int]]:
        return random_prompts(self.LENGTHS[isa], model.program.vocab_size)

    @pytest.fixture
    def plain(self, model: LoadedModel, isa: str, prompts: dict, plain_runs: dict) -> Run:
        if ("smollm2", isa) not in plain_runs:
            plain_runs["smollm2", isa] = run(model, PLAIN, prompts)
        return plain_runs["smollm2", isa]

    @pytest.mark.parametrize("name", CONFIGURATIONS)
    def test_configuration(self, model: LoadedModel, plain: Run, prompts: dict, name: str) -> None:
        assert_same(plain, run(model, CONFIGURATIONS[name], prompts), list(prompts))

    def test_prefix_hit(self, model: LoadedModel, plain: Run, prompts: dict) -> None:
        long_enough = {n: ids for n, ids in prompts.items() if len(ids) > 16}
        assert_same(plain, prefix_hit(model, long_enough, Setup(prefix_caching=True)), list(long_enough))
        assert_same(plain, partial_hit(model, long_enough, Setup()), list(long_enough))

    def test_preemption(self, model: LoadedModel, isa: str) -> None:
        prompts = random_prompts((20, 30, 40, 50), model.program.vocab_size)
        steps = 20
        want = run(model, PLAIN, prompts, steps)
        assert_same(want, preempted(model, prompts, steps), list(prompts))


@pytest.mark.model
@pytest.mark.soak
@pytest.mark.parametrize("name", [*CONFIGURATIONS, "prefix-hit", "partial-hit"])
@pytest.mark.parametrize("model_name", ["smollm2_path", "gemma3_path"])
def test_real_models_at_all_lengths(request: pytest.FixtureRequest, isa: str, name: str, model_name: str, plain_runs: dict) -> None:
    from octavo.models.loading import load_model

    model = load_model(request.getfixturevalue(model_name))
    lengths = LENGTHS + LONG if isa.startswith("avx512") else (1, 13, 16, 17, 64, 65, 257, 513)
    prompts = random_prompts(lengths, model.program.vocab_size)
    key = (model_name, isa)
    if key not in plain_runs:
        plain_runs[key] = run(model, PLAIN, prompts)
    if name == "prefix-hit":
        assert_same(plain_runs[key], prefix_hit(model, prompts, Setup(prefix_caching=True)), list(prompts))
    elif name == "partial-hit":
        assert_same(plain_runs[key], partial_hit(model, prompts, Setup(max_num_seqs=16, chunk=512)), list(prompts))
    else:
        assert_same(plain_runs[key], run(model, CONFIGURATIONS[name], prompts), list(prompts))
