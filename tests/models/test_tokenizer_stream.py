"""Text token by token (A01, A26): joined pushes and flush are decode(prompt + output) minus decode(prompt)."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.models.tokenizer import Tokenizer

from .vocabularies import BLANK, bytes_metadata, spm_metadata

BYTES = Tokenizer.from_gguf(bytes_metadata(["<note>"]))
SPM_PIECES = [BLANK + "Hello", BLANK + "world", "!", BLANK, "x", "\n", BLANK + "indent", "Once", BLANK + "Once", "é"]
SPM = Tokenizer.from_gguf(spm_metadata(SPM_PIECES))
SPM_PLAIN = Tokenizer.from_gguf(spm_metadata(SPM_PIECES, add_space_prefix=False))
ID = {piece: 259 + i for i, piece in enumerate(SPM_PIECES)}


def deltas(tokenizer: Tokenizer, output: list[int], prompt: list[int] = (), skip_special_tokens: bool = True) -> list[str]:  # type: ignore[assignment]
    stream = tokenizer.stream(prompt, skip_special_tokens)
    return [*(stream.push(token_id) for token_id in output), stream.flush()]


def minus_prompt(tokenizer: Tokenizer, prompt: list[int], output: list[int], skip: bool = True) -> str:
    """decode(prompt + output) minus what of decode(prompt) is complete."""
    before = tokenizer.decode(prompt, skip)
    whole = tokenizer.decode(prompt + output, skip)
    if not whole.startswith(before):  # the output went on with a character that the prompt began
        before = before[:-1]
    assert whole.startswith(before)
    return whole[len(before) :]


# --- A01 -------------------------------------------------------------------------------------------------------------


def test_emoji_made_of_four_byte_tokens():
    output = list("hi😀字!".encode())
    assert len(output) == 10
    assert deltas(BYTES, output) == ["h", "i", "", "", "", "😀", "", "", "字", "!", ""]
    assert BYTES.decode(output) == "hi😀字!"


def test_cut_inside_a_character_is_one_replacement_in_both_forms():
    output = list("hi😀字!".encode())[:4]
    assert deltas(BYTES, output) == ["h", "i", "", "", "\ufffd"]
    assert BYTES.decode(output) == "hi\ufffd"


def test_two_emojis_are_two_deltas():
    assert [text for text in deltas(BYTES, list("😀👍".encode())) if text] == ["😀", "👍"]


@pytest.mark.parametrize("character", ["é", "字", "😀"])
def test_a_character_that_the_prompt_began_belongs_to_the_output(character):
    data = list(character.encode())
    for cut in range(1, len(data)):
        prompt = [104, *data[:cut]]
        assert "".join(deltas(BYTES, [*data[cut:], 105], prompt)) == character + "i"
        assert deltas(BYTES, [105], prompt) == ["\ufffdi", ""]
        assert deltas(BYTES, [], prompt) == ["\ufffd"]


def test_bytes_of_consecutive_tokens_join_to_the_character():
    output = list("字".encode())
    assert b"".join(map(BYTES.token_bytes, output)).decode() == "字"
    assert [BYTES.token_text(i) for i in output] == ["\ufffd"] * 3


def test_byte_tokens_of_sentencepiece_join_too():
    output = [ID["x"], *(3 + byte for byte in "😀".encode()), ID["!"]]
    assert deltas(SPM_PLAIN, output) == ["x", "", "", "", "😀", "!", ""]


# --- A26 -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pieces", "text"),
    [
        ([BLANK + "Hello", BLANK + "world", "!"], "Hello world!"),
        ([BLANK, BLANK, "x"], " x"),
        (["\n", BLANK + "indent"], "\n indent"),
        (["x", BLANK + "world"], "x world"),
    ],
)
def test_one_blank_comes_off_the_very_start_where_the_model_puts_one(pieces, text):
    output = [ID[piece] for piece in pieces]
    assert "".join(deltas(SPM, output)) == SPM.decode(output) == text
    spelt = "".join(pieces).replace(BLANK, " ")
    assert "".join(deltas(SPM_PLAIN, output)) == SPM_PLAIN.decode(output) == spelt
    # After a prompt the same pieces keep every blank, whatever the prompt ends with.
    for prompt in ([ID[BLANK + "Once"]], [1, ID[BLANK + "Once"]], [ID[BLANK + "Once"], ID[BLANK]], [ID[BLANK]]):
        assert "".join(deltas(SPM, output, prompt)) == minus_prompt(SPM, prompt, output) == spelt


def test_a_prompt_of_hidden_tokens_is_no_text():
    output = [ID[BLANK + "Hello"], ID[BLANK + "world"]]
    assert "".join(deltas(SPM, output, [1])) == "Hello world"
    assert "".join(deltas(SPM, output, [1], skip_special_tokens=False)) == " Hello world"  # "<s>" is shown, so this is not the start
    assert SPM.decode([1, *output], skip_special_tokens=False) == "<s> Hello world"


def test_special_tokens_between_words():
    output = [ID[BLANK + "Hello"], 1, 2, ID[BLANK + "world"]]
    assert deltas(SPM, output) == ["Hello", "", "", " world", ""]
    assert deltas(SPM, output, skip_special_tokens=False) == ["Hello", "<s>", "</s>", " world", ""]


def test_user_text_round_trips_through_the_prefix_blank():
    for text in ["Hello world", " Hello", "  x", "\n indent", "", "é\x00"]:
        assert SPM.decode(SPM.encode(text)) == text


# --- the general rule ------------------------------------------------------------------------------------------------

byte_ids = st.one_of(st.sampled_from([256, 257, 258, 259]), st.integers(0, 255), st.sampled_from(list("é😀字 ".encode())))
spm_ids = st.one_of(st.sampled_from(sorted(ID.values())), st.integers(0, 258), st.sampled_from([3 + byte for byte in "é😀 ".encode()]))


@settings(max_examples=300, deadline=None)
@given(data=st.data(), name=st.sampled_from(["bytes", "spm", "spm_plain"]), skip=st.booleans())
def test_stream_is_decode(data, name, skip):
    tokenizer = {"bytes": BYTES, "spm": SPM, "spm_plain": SPM_PLAIN}[name]
    ids = st.lists(byte_ids if name == "bytes" else spm_ids, max_size=12)
    prompt, output = data.draw(ids), data.draw(ids)
    assert "".join(deltas(tokenizer, output, skip_special_tokens=skip)) == tokenizer.decode(output, skip)
    # The stream of a prompt, not flushed, and the stream that follows it are the stream of the whole.
    first = tokenizer.stream((), skip)
    before = "".join(map(first.push, prompt))
    assert before + "".join(deltas(tokenizer, output, prompt, skip)) == tokenizer.decode(prompt + output, skip)


@settings(max_examples=100, deadline=None)
@given(head=st.lists(spm_ids, max_size=8), tails=st.lists(st.lists(spm_ids, max_size=6), min_size=2, max_size=3))
def test_forks_go_their_own_ways(head, tails):
    stream = SPM.stream()
    begun = "".join(map(stream.push, head))
    forks = [stream.fork() for _ in tails]
    texts = [begun] * len(tails)
    for step in range(6):  # in turns, so that shared state would show
        for i, tail in enumerate(tails):
            texts[i] += "".join(map(forks[i].push, tail[step : step + 1]))
    for i, tail in enumerate(tails):
        assert texts[i] + forks[i].flush() == SPM.decode(head + tail)
    assert begun + stream.flush() == SPM.decode(head)  # the original is where it was


def test_a_push_costs_the_same_late_as_early():
    ids = BYTES.encode("word 字 " * 4000, add_special_tokens=False)
    stream = BYTES.stream(ids)
    assert stream.push(104) == "h"

    def seconds(stream, part):
        start_s = time.thread_time()
        for token_id in part:
            stream.push(token_id)
        return time.thread_time() - start_s

    stream = BYTES.stream()
    early = min(seconds(stream, ids[:5000]) for _ in range(3))
    for token_id in ids:
        stream.push(token_id)
    late = min(seconds(stream, ids[:5000]) for _ in range(3))
    assert late < 5 * early
