"""A draft model whose KV lies in pages that the target's pool lends: nothing that a client gets changes, and nobody waits for the draft."""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from octavo import LLM, SamplingParams
from octavo.core.lodging import Lodging
from octavo.speculative.draft_model import DraftModel, OwnBlocks
from tests.models.tiny import write_tiny_gguf

TARGETS = {
    "windows": {"arch": "gemma3", "layers": 6, "hidden": 32, "heads": 2, "ffn": 32},
    "none": {"arch": "llama", "layers": 4, "hidden": 64, "heads": 4, "ffn": 64},
}
DRAFTS = {
    "smaller": {"arch": "llama", "layers": 1, "hidden": 32, "heads": 2, "ffn": 32},
    "as large": {"arch": "llama", "layers": 4, "hidden": 64, "heads": 4, "ffn": 64},
    "larger": {"arch": "llama", "layers": 8, "hidden": 64, "heads": 4, "ffn": 64},
    "with a window": {"arch": "gemma3", "layers": 4, "hidden": 32, "heads": 2, "ffn": 32},
}


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    made = {}
    for kind, models in (("target", TARGETS), ("draft", DRAFTS)):
        for name, sizes in models.items():
            made[f"{kind} {name}"] = write_tiny_gguf(folder / f"{kind}-{name}.gguf", context=1024, seed=len(made), **sizes)  # type: ignore[arg-type]
    return made


@pytest.fixture(scope="module")
def plain(paths: dict[str, Path]) -> Iterator[dict[str, LLM]]:
    made = {name: LLM(str(paths[f"target {name}"]), num_kv_blocks=512, enable_prefix_caching=False) for name in TARGETS}
    yield made
    for llm in made.values():
        llm.close()


def jobs_of(seed: str) -> list[tuple[list[int], SamplingParams]]:
    rng = random.Random(seed)
    params = SamplingParams(max_tokens=24, ignore_eos=True, logprobs=1)
    return [
        ([rng.randrange(3, 500) for _ in range(rng.randrange(1, 90))], replace(params, temperature=i % 2 * 0.3, seed=i)) for i in range(9)
    ]


def blocks_of(llm: LLM) -> OwnBlocks | Lodging:
    draft = llm.engine.speculator._proposers["draft"]
    assert isinstance(draft, DraftModel)
    return draft._blocks


def check(llm: LLM, plain: LLM, jobs: list[tuple[list[int], SamplingParams]]) -> None:
    outputs = llm.generate([prompt for prompt, _ in jobs], [params for _, params in jobs])
    for output, (prompt, params) in zip(outputs, jobs, strict=True):
        assert output.outputs == plain.generate(prompt, params)[0].outputs
    llm.engine.scheduler.check_invariants()


@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("target", TARGETS)
def test_drafts_lodge_and_change_nothing(paths: dict[str, Path], plain: dict[str, LLM], target: str, draft: str) -> None:
    """In a pool that is short for the target alone."""
    options: dict[str, Any] = {"spec": 3, "spec_method": "draft", "draft_model": str(paths[f"draft {draft}"])}
    with LLM(str(paths[f"target {target}"]), num_kv_blocks=24, max_num_batched_tokens=64, max_num_seqs=8, **options) as llm:
        lodging = blocks_of(llm)
        assert isinstance(lodging, Lodging)
        given_up, give_up = list[bool](), lodging._give_up
        lodging._give_up = lambda: given_up.append(give_up()) or given_up[-1]  # type: ignore[func-returns-value]
        check(llm, plain[target], jobs_of(f"{target} {draft}"))
        lodging.check_invariants()
        assert llm.engine.speculator.stats.num_proposed > 0
        assert not llm.engine.scheduler.kv.pool.lent  # all have ended
        assert given_up or draft == "smaller"  # of which there was room for all


def test_a_draft_that_is_the_target_is_always_right(paths: dict[str, Path], plain: dict[str, LLM]) -> None:
    """What it says depends on every byte of its KV: a page that the target wrote on would show."""
    path = str(paths["target windows"])
    options: dict[str, Any] = {"spec": 4, "spec_method": "draft", "draft_model": path, "num_kv_blocks": 20, "max_num_seqs": 4}
    with LLM(path, max_num_batched_tokens=64, **options) as llm:
        lodging = blocks_of(llm)
        assert isinstance(lodging, Lodging) and lodging.pages is not None  # six pages to a block
        check(llm, plain["windows"], jobs_of("itself"))
        stats = llm.engine.speculator.stats
        assert stats.num_accepted == stats.num_proposed > 0


OWN = {
    "tiers": ({"kv_host_memory": 1 << 20}, "goes to host memory"),
    "reserved": ({"kv_reservation": "oracle", "enable_prefix_caching": False}, "chunks are reserved"),
    "odd sizes": ({"kv_cache_dtype": "f16", "block_size": 16}, "waste too much"),
}


@pytest.mark.parametrize("case", OWN)
def test_where_it_cannot_lodge_it_has_a_pool_and_says_so(
    paths: dict[str, Path], plain: dict[str, LLM], tmp_path: Path, caplog: pytest.LogCaptureFixture, case: str
) -> None:
    options, why = OWN[case]
    draft = paths["draft smaller"]
    if case == "odd sizes":  # a layer larger than a page
        draft = write_tiny_gguf(tmp_path / "wide.gguf", layers=1, hidden=64, heads=16, kv_heads=16, head_dim=16, ffn=32, context=1024)
    with caplog.at_level(logging.INFO, logger="octavo.engine"):
        llm = LLM(str(paths["target windows"]), num_kv_blocks=64, spec=3, spec_method="draft", draft_model=str(draft), **options)  # type: ignore[arg-type]
    with llm:
        assert isinstance(blocks_of(llm), OwnBlocks)
        assert why in caplog.text
        if case != "odd sizes":
            check(llm, plain["windows"], jobs_of(case)[:4])
