"""Cluster rules of the public simulator: who gets a request, who is lent, who goes home."""

from __future__ import annotations

from octavo.distributed.pools import FewestPendingTokens, MixedPools, PoolMachine, decode_ended, kv_freed, prompt_ended


def machines(num_prompt: int, num_token: int, num_kv_tokens: float = 1000.0, waiting: int = 0) -> list[PoolMachine]:
    return [PoolMachine(i, i < num_prompt, num_kv_tokens, lambda: waiting) for i in range(num_prompt + num_token)]


def indices(pair: tuple[PoolMachine, PoolMachine]) -> tuple[int, int]:
    return pair[0].index, pair[1].index


def test_fewest_pending_tokens_first_of_equals() -> None:
    pool = machines(0, 3)
    rule = FewestPendingTokens(pool)
    assert [indices(rule.assign(n, 5)) for n in (10, 4, 4, 3, 1)] == [(0, 0), (1, 1), (2, 2), (1, 1), (2, 2)]
    assert [machine.num_pending for machine in pool] == [11, 9, 7]
    prompt_ended(pool[0], 10)
    assert indices(rule.assign(2, 5)) == (0, 0)
    decode_ended(pool[0])
    assert pool[0].num_pending == 3


def test_prompts_by_pending_tokens_decoding_by_reserved_memory() -> None:
    pool = machines(2, 2)
    rule = MixedPools(pool)
    assert [indices(rule.assign(*lengths)) for lengths in ((100, 10), (50, 400), (60, 10), (20, 10))] == [(0, 2), (1, 3), (1, 2), (0, 2)]
    assert [machine.num_pending for machine in pool] == [120, 110, 3, 1]
    assert [machine.num_reserved for machine in pool] == [122, 112, 210, 450]
    kv_freed(pool[0], 101)  # its KV was sent on
    kv_freed(pool[2], 110)
    assert (pool[0].num_reserved, pool[2].num_reserved) == (21, 100)


def test_a_long_queue_makes_a_token_machine_mixed_until_it_has_drained() -> None:
    pool = machines(1, 2, waiting=1)
    rule = MixedPools(pool, max_pending_tokens=100)
    assert indices(rule.assign(100, 10)) == (0, 1)
    assert indices(rule.assign(1, 10)) == (2, 2)  # fewest pending tokens, and least reserved memory
    assert (rule.token_pool, rule.mixed_pool, pool[2].is_mixed) == ([pool[1]], [pool[2]], True)
    assert indices(rule.assign(98, 200)) == (2, 1)  # the mixed one still takes prompts: 2 + 98 pending tokens
    rule.drained(pool[1])
    assert rule.token_pool == [pool[1]]  # was at home
    rule.drained(pool[2])
    assert (rule.token_pool, rule.mixed_pool, pool[2].is_mixed) == ([pool[1], pool[2]], [], False)


def test_without_anybody_waiting_a_prompt_machine_takes_any_number_of_tokens() -> None:
    rule = MixedPools(machines(1, 1, num_kv_tokens=1e9), max_pending_tokens=100)
    assert [indices(rule.assign(500, 10)) for _ in range(3)] == [(0, 1)] * 3


def test_full_memory_makes_a_prompt_machine_mixed() -> None:
    """Reaching the capacity is too much, as there."""
    pool = machines(2, 1, num_kv_tokens=100.0)
    rule = MixedPools(pool)
    assert indices(rule.assign(40, 19)) == (0, 2)
    assert indices(rule.assign(21, 20)) == (1, 1)  # 59 + 41 would fill it; machine 1 has the least reserved
    assert rule.mixed_pool == [pool[1]]
    assert indices(rule.assign(10, 30)) == (0, 2)  # 59 + 40 do not
    rule.drained(pool[1])
    assert (rule.prompt_pool, rule.mixed_pool) == ([pool[0], pool[1]], [])


def test_nobody_left_to_take_both_phases_go_to_the_least_busy() -> None:
    pool = machines(1, 1, num_kv_tokens=50.0, waiting=1)
    rule = MixedPools(pool, max_pending_tokens=20)
    assert indices(rule.assign(15, 60)) == (0, 0)  # too large for any: the prompt machine is lent for its decoding
    assert (rule.prompt_pool, rule.mixed_pool) == ([], [pool[0]])
    assert indices(rule.assign(15, 60)) == (1, 1)  # no prompt pool; the mixed one is too long; the last token machine is lent
    assert rule.mixed_pool == [pool[0], pool[1]]
    assert indices(rule.assign(15, 60)) == (0, 0)
