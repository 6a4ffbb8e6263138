"""A draft model of other tokens is refused at the start, one that differs by padding is not, and padding is never proposed (A17).

The comparison token by token: tests/speculative/test_draft_model.py::test_vocabularies.
"""

from __future__ import annotations

import logging
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import pytest

from octavo.core.request import SamplingParams
from tests.cases.bigram import SIZE, byte_id, then, write_bigram
from tests.cases.harness import Job, open_engine, run
from tests.cli.conftest import Octavo, octavo  # noqa: F401
from tests.models.tiny import IM_END_ID

TEXT = [byte_id(c) for c in "!abcdefgh"]
SCRIPT, OTHERWISE = then(*TEXT, IM_END_ID), {TEXT[0]: 1.0}
PIECES = ("aa", "bb")
PARAMS = SamplingParams(temperature=0, max_tokens=20)
TOKENS, KINDS = "tokenizer.ggml.tokens", "tokenizer.ggml.token_type"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def target(folder: Path) -> Path:
    return write_bigram(folder / "target.gguf", SCRIPT, OTHERWISE, PIECES)


def swapped(path: Path) -> Path:
    """As the target, but for "aa" and "bb", which change places."""
    return write_bigram(path, SCRIPT, OTHERWISE, PIECES[::-1])


REFUSED = {
    "another size": (lambda p: write_bigram(p, SCRIPT, OTHERWISE, PIECES[:1]), "its vocabulary has 261 tokens and the target's 262"),
    "two tokens swapped": (swapped, "token 260 is 'bb' in the draft and 'aa' in the target"),
    "another end": (
        lambda p: write_bigram(p, SCRIPT, OTHERWISE, PIECES, metadata={"tokenizer.ggml.eos_token_id": 1}),
        r"it ends with tokens \[0, 1, 2\] and the target with \[0, 2\]",
    ),
}


@pytest.mark.parametrize("difference", REFUSED)
def test_other_vocabularies_are_refused_at_the_start(
    octavo: Octavo,  # noqa: F811
    folder: Path,
    target: Path,
    difference: str,
) -> None:
    """By `octavo serve` itself, before it listens; the message names the first difference."""
    make, message = REFUSED[difference]
    draft = make(folder / f"{difference}.gguf")
    ended = octavo("serve", "--model", target, "--spec", "auto", "--draft-model", draft, "--port", "0", "--num-kv-blocks", "8")
    assert ended.code == 1 and ended.out == ""
    assert re.search(f"^octavo: --draft-model: {message}; they must be the same$", ended.err, re.MULTILINE), ended.err


def padded(path: Path, size: int, tokens_alone: bool) -> Path:
    """As the target, with rows up to ``size``, the likeliest of which is always the last; ``tokens_alone``: they have no names either."""
    surely = {size - 1: 100.0}
    script = {last: dict(following) | surely for last, following in SCRIPT.items()}
    path = write_bigram(path, script, OTHERWISE | surely, PIECES, size=size)
    if tokens_alone:
        whole = gguf.GGUFReader(path).fields
        tokens = [bytes(whole[TOKENS].parts[i]).decode() for i in whole[TOKENS].data][:SIZE]
        kinds = [int(whole[KINDS].parts[i][0]) for i in whole[KINDS].data][:SIZE]
        write_bigram(path, script, OTHERWISE | surely, PIECES, size=size, metadata={TOKENS: tokens, KINDS: kinds})
    return path


@pytest.mark.parametrize("tokens_alone", [False, True], ids=["named padding", "rows alone"])
def test_a_draft_with_padding_proposes_none_of_it(folder: Path, target: Path, tokens_alone: bool) -> None:
    """Its padding is likelier than anything else after every token, and yet every draft comes true."""
    draft = padded(folder / f"padded{tokens_alone}.gguf", SIZE + 32, tokens_alone)
    with open_engine(target, num_kv_blocks=32, spec=5, spec_method="draft", draft_model=str(draft)) as engine:
        job = Job([TEXT[0]], PARAMS)
        run(engine, job)
        assert job.answer()[0] == [*TEXT[1:], IM_END_ID]
        stats = engine.speculator.stats
        assert stats.num_accepted == stats.num_proposed > 5


def test_a_target_with_padding(folder: Path, target: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A request may name a row that the draft has not: nothing is drafted for it, and all is for the others."""
    wide = write_bigram(folder / "wide.gguf", SCRIPT, OTHERWISE, PIECES, size=SIZE + 32)
    with open_engine(wide, num_kv_blocks=32, spec=5, spec_method="draft", draft_model=str(target)) as engine:
        stranger, stats = SIZE + 5, engine.speculator.stats
        params: list[dict[str, Any]] = [
            {"logit_bias": {stranger: -1.0}}, {"stop_token_ids": (stranger,)}, {"bad_words_token_ids": ((stranger, 5),)},
            {"allowed_token_ids": (*TEXT, IM_END_ID, stranger)},
        ]  # fmt: skip
        asked = [Job([TEXT[0]], replace(PARAMS, **change)) for change in params]
        asked += [Job(prompt, PARAMS) for prompt in ([stranger, TEXT[0]], [TEXT[0], stranger, TEXT[0]])]
        run(engine, *asked)
        assert stats.num_proposed == 0
        ordinary = Job([TEXT[0]], PARAMS)
        run(engine, ordinary, *(Job(job.prompt_ids, job.params) for job in asked))
        assert {tuple(job.answer()[0]) for job in (ordinary, *asked)} == {(*TEXT[1:], IM_END_ID)}
        assert stats.num_accepted == stats.num_proposed > 5
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
