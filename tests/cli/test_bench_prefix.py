"""`octavo bench prefix`: exact counts of what each way of sharing finds, and cases that are refused."""

from __future__ import annotations

import json
from pathlib import Path

from tests.cli.conftest import Octavo

CASE = ("--users", "2", "--turns", "3", "--requests", "5", "--system", "21", "--question", "7", "--output", "9")


def test_counts_follow_from_the_lengths(octavo: Octavo, tiny: Path) -> None:
    ended = octavo("bench", "prefix", "--model", tiny, "--threads", "1", "--num-kv-blocks", "64", *CASE)
    assert ended.code == 0 and ended.err == ""
    *shown, last = ended.out.splitlines()
    record = json.loads(last)
    chat, system = record["loads"]["chat"], record["loads"]["system"]
    lengths = [21 + 7 + turn * 16 for turn in range(3)]  # prompts of a user's turns
    assert chat["num_prompt"] == 2 * sum(lengths) and system["num_prompt"] == 5 * 28
    # By the token all that was computed: of the last turn its prompt and all of the answer but its last token.
    assert chat["token"]["num_cached"] == 21 + 2 * sum(length - 8 for length in lengths[1:])
    assert chat["block"]["num_cached"] == 16 + 2 * sum((length - 8) // 16 * 16 for length in lengths[1:])
    assert (system["block"]["num_cached"], system["token"]["num_cached"]) == (4 * 16, 4 * 21)
    assert (system["token"]["num_copied"], system["token"]["num_copies"]) == (4 * 5, 4)
    assert all(load["block"]["num_copied"] == load["block"]["num_copies"] == 0 for load in (chat, system))
    assert all(side["ttft_ms"] > 0 for load in (chat, system) for side in (load["block"], load["token"]))
    assert len(shown) == 9 and shown[1].startswith("chat: 2 users, 3 turns each; system: 5 single requests;")
    assert "chat" in shown[3] and "token" in shown[4]


def test_refused(octavo: Octavo, tiny_base: Path) -> None:
    ended = octavo("bench", "prefix", "--model", tiny_base, *CASE)
    assert ended.code == 1 and "--turns: 3 turns make conversations of 69 tokens, and a sequence has room for 64" in ended.err
    ended = octavo("bench", "prefix", "--model", tiny_base, "--prefix-granularity", "token")
    assert ended.code == 2 and "--prefix-granularity" in ended.err and "both ways of sharing are measured" in ended.err
