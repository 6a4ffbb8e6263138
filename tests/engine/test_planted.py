"""Slow-downs that were planted are named: in 95 of 100 requests that took a fifth longer than in the same run without."""

from __future__ import annotations

import random

import pytest

from octavo.engine.causes import Bottleneck, Cause
from octavo.engine.explain import Explanation
from tests.engine.planted import Arrival, accounts, hurt, run_load, salted, steady_load, tokens

SEEDS = (1, 2, 3)


def share_named(found: list[Explanation], causes: set[Cause]) -> float:
    assert len(found) >= 20, "the plant hurts hardly anybody"
    return sum(account.main in causes for account in found) / len(found)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_tiny_pool(seed: int) -> None:
    load = steady_load(120, 20.0, seed)
    plain, planted = run_load(load), run_load(load, num_kv_blocks=10)
    found = hurt(accounts(planted), accounts(plain))
    assert share_named(found, {Cause.QUEUED_KV, Cause.PREEMPTED, Cause.RECOMPUTED}) >= 0.95
    assert all(account.bottleneck is Bottleneck.KV for account in found if account.main is Cause.QUEUED_KV)


@pytest.mark.parametrize("seed", SEEDS)
def test_one_huge_prompt(seed: int) -> None:
    load = steady_load(120, 12.0, seed)
    huge = Arrival("huge", 2.0, tokens(random.Random(5), 12_000), 4)
    found = hurt(accounts(run_load([*load, huge])), accounts(run_load(load)))
    assert share_named(found, {Cause.OTHERS_PREFILL, Cause.QUEUED_PROMPT}) >= 0.95


@pytest.mark.parametrize("seed", SEEDS)
def test_a_long_queue(seed: int) -> None:
    load = steady_load(120, 8.0, seed)
    rng = random.Random(seed)
    burst = [Arrival(f"burst{i}", 2.0, tokens(rng, 10), 40) for i in range(250)]
    plain, planted = run_load(load, max_num_seqs=6), run_load([*load, *burst], max_num_seqs=6)
    found = hurt(accounts(planted), accounts(plain))
    assert share_named(found, {Cause.QUEUED_BATCH, Cause.QUEUED_TOKENS}) >= 0.95


@pytest.mark.parametrize("seed", SEEDS)
def test_a_cache_that_salts_keep_cold(seed: int) -> None:
    load = steady_load(80, 1.5, seed, prefix=480)
    found = hurt(accounts(run_load(salted(load))), accounts(run_load(load)))
    assert share_named(found, {Cause.CACHE_MISS}) >= 0.95
