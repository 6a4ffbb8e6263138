"""`octavo bench offline`: the record, and cases whose figures would mean something else."""

from __future__ import annotations

import json
from pathlib import Path

from tests.cli.conftest import Octavo

KEYS = {
    *("bench", "model", "num_prompt", "num_output", "batch", "repeat", "prefill_tok_s", "decode_tok_s"),
    *("threads", "isa", "fingerprint", "date"),
}


def offline(octavo: Octavo, tiny: Path, *flags: str) -> list[str]:
    ended = octavo("bench", "offline", "--model", tiny, "--prompt", "20", "--output", "5", "--batch", "3", "--repeat", "2", *flags)
    assert ended.code == 0 and ended.err == ""
    return ended.out.splitlines()


def test_the_last_line_is_the_record(octavo: Octavo, tiny: Path) -> None:
    head, figures, last = offline(octavo, tiny, "--threads", "1")
    record = json.loads(last)
    assert record.keys() >= KEYS
    assert (record["num_prompt"], record["num_output"], record["batch"], record["repeat"], record["threads"]) == (20, 5, 3, 2, 1)
    assert record["model"] == "tiny" and record["prefill_tok_s"] > 0 and record["decode_tok_s"] > 0
    assert head.startswith("tiny: 3 x (20 + 5) tokens, 1 threads") and f"prefill {record['prefill_tok_s']:.1f} token/s" in figures


def test_json_prints_nothing_else(octavo: Octavo, tiny: Path) -> None:
    (line,) = offline(octavo, tiny, "--json")
    assert json.loads(line).keys() >= KEYS


def test_flags_given_are_the_flags_measured(octavo: Octavo, tiny: Path) -> None:
    (line,) = offline(octavo, tiny, "--json", "--max-num-batched-tokens", "8")
    record = json.loads(line)
    assert (record["batch"], record["max_num_seqs"], record["max_num_batched_tokens"]) == (3, 3, 8)
    ended = octavo("bench", "offline", "--model", tiny, "--prompt", "20", "--output", "5", "--batch", "3", "--max-num-seqs", "2")
    assert ended.code == 1 and "--batch: 3 sequences cannot run side by side with --max-num-seqs 2" in ended.err


def test_cases_that_would_measure_something_else_are_refused(octavo: Octavo, tiny_base: Path) -> None:
    argv = ("bench", "offline", "--model", tiny_base, "--repeat", "1")
    ended = octavo(*argv, "--prompt", "60", "--output", "8")
    assert ended.code == 1 and ended.err == "octavo: --prompt and --output: 60 + 8 tokens are more than the context of 64\n"
    ended = octavo(*argv, "--prompt", "20", "--output", "20", "--batch", "4", "--num-kv-blocks", "11")
    needs = "octavo: --batch: 4 sequences of 40 tokens need 12 KV blocks of 16 tokens, but the pool has 11; "
    assert ended.code == 1 and ended.err.startswith(needs)
    assert octavo(*argv, "--prompt", "20", "--output", "20", "--batch", "4", "--num-kv-blocks", "12").code == 0
