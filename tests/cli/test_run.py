"""`octavo run`: the answer alone on stdout, everything else on stderr."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from octavo import LLM, SamplingParams
from octavo.cli.run import DEFAULT_SYSTEM
from tests.cli.conftest import Octavo

GREEDY = SamplingParams(temperature=0, max_tokens=6)
PROMPT = "the quick brown fox"


@pytest.fixture(scope="module")
def llm(tiny: Path) -> LLM:
    return LLM(str(tiny), num_kv_blocks=64)


def text_of(events: object) -> str:
    return "".join(event.text for event in events)  # type: ignore[attr-defined]


def test_raw_continues_the_prompt(octavo: Octavo, tiny: Path, llm: LLM) -> None:
    ended = octavo("run", PROMPT, "--raw", "--model", tiny, "--max-tokens", "6")
    assert ended.code == 0
    assert ended.out == text_of(llm.stream(PROMPT, GREEDY)) + "\n"
    assert ended.err == "(cut after 6 tokens; --max-tokens raises the limit)\n"


def test_the_prompt_goes_through_the_template_with_a_system_message(octavo: Octavo, tiny: Path, llm: LLM) -> None:
    user = {"role": "user", "content": PROMPT}
    for flags, system in (([], DEFAULT_SYSTEM), (["--system", "be brief"], "be brief"), (["--system", ""], "")):
        messages = [{"role": "system", "content": system}, user] if system else [user]
        ended = octavo("run", PROMPT, "--model", tiny, "--max-tokens", "6", *flags)
        assert ended.out == text_of(llm.stream_chat(messages, GREEDY)) + "\n"


def test_a_dash_reads_stdin(octavo: Octavo, tiny: Path) -> None:
    argv = ("--raw", "--model", tiny, "--max-tokens", "6")
    assert octavo("run", "-", *argv, stdin=PROMPT).out == octavo("run", PROMPT, *argv).out


def test_a_seed_repeats_the_text(octavo: Octavo, tiny: Path) -> None:
    argv = ("run", PROMPT, "--raw", "--model", tiny, "--max-tokens", "20", "--temperature", "1", "--seed")
    first, other = octavo(*argv, "7").out, octavo(*argv, "8").out
    assert octavo(*argv, "7").out == first != other


def test_a_model_without_a_template_says_so(octavo: Octavo, tiny_base: Path) -> None:
    ended = octavo("run", PROMPT, "--model", tiny_base)
    assert ended.code == 0 and ended.out
    assert ended.err.startswith("(the model has no chat template; it continues the prompt as it is)\n")
    assert octavo("run", PROMPT, "--model", tiny_base, "--raw").out == ended.out


def test_a_full_context_is_told_apart_from_max_tokens(octavo: Octavo, tiny: Path) -> None:
    ended = octavo("run", PROMPT, "--raw", "--model", tiny, "--max-model-len", "16")
    assert re.fullmatch(r"\(cut after \d+ tokens; the context is full\)\n", ended.err)


def test_statistics_go_to_stderr(octavo: Octavo, tiny: Path) -> None:
    argv = ("run", PROMPT, "--raw", "--model", tiny, "--max-tokens", "6")
    ended = octavo(*argv, "--stats", "--backend", "reference")
    numbers = r"load \d+\.\d\d s, first token \d+\.\d{3} s, 6 tokens, then \d+\.\d token/s \(reference\)"
    assert re.search(numbers, ended.err)
    assert re.search(r"token/s \((portable|avx2|avx512_(vnni|bf16))\)", octavo(*argv, "--stats").err)


def test_the_newline_of_echo_is_no_part_of_the_question(octavo: Octavo, tiny: Path) -> None:
    argv = ("--model", tiny, "--max-tokens", "6")
    asked = octavo("run", PROMPT, *argv).out
    for newline in ("\n", "\r\n"):
        assert octavo("run", "-", *argv, stdin=PROMPT + newline).out == asked
