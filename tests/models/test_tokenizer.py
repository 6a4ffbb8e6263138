"""Encoding, BOS, special tokens and what a GGUF file may get wrong."""

from __future__ import annotations

import json
import time
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.models import sentencepiece_merges
from octavo.models.tokenizer import Tokenizer
from octavo.models.vocabulary import TokenizerError, byte_level_alphabet

from .vocabularies import BLANK, CONTROL, NASTY_TEXTS, NORMAL, USER, bytes_metadata, gguf, spm_metadata

GOLDEN = json.loads((Path(__file__).parent / "golden_tokenize.json").read_text("utf-8"))


# --- real models -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["smollm2", "gemma3"])
def real(request):
    from octavo.models.gguf import GGUFFile

    path = request.getfixturevalue(f"{request.param}_path")
    return request.param, GGUFFile.open(path).metadata


@pytest.mark.model
def test_golden_ids_and_texts(real):
    name, metadata = real
    tokenizer = Tokenizer.from_gguf(metadata)
    for entry in GOLDEN[name]["tokenize"] + GOLDEN[name]["prompts"]:
        assert tokenizer.encode(entry["text"], add_special_tokens=False) == entry["ids"], entry["text"]
        assert tokenizer.decode(entry["ids"], skip_special_tokens=False) == entry["text"]
    for entry in GOLDEN[name]["prompts"]:
        stream = tokenizer.stream(entry["ids"], skip_special_tokens=False)
        assert "".join(map(stream.push, entry["output_ids"])) + stream.flush() == entry["output_text"]


@pytest.mark.model
def test_real_settings_and_build_time(real):
    name, metadata = real
    plain = {key: metadata[key] for key in metadata if key.startswith("tokenizer.")}
    start_s = time.thread_time()
    tokenizer = Tokenizer.from_gguf(plain)
    build_s = time.thread_time() - start_s
    start_s = time.thread_time()
    sorted(map(str, plain["tokenizer.ggml.tokens"]))
    assert build_s < 30 * (time.thread_time() - start_s)  # 5 and 8 times as long as sorting the vocabulary, on whatever machine
    if name == "smollm2":
        assert (tokenizer.vocab_size, tokenizer.add_bos) == (49152, False)
        assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|im_start|>", "<|im_end|>")
        assert tokenizer.eos_token_ids == {0, 2}
        assert "add_generation_prompt" in tokenizer.chat_template_source
    else:
        assert (tokenizer.vocab_size, tokenizer.add_bos) == (262144, True)
        assert (tokenizer.bos_token, tokenizer.eos_token) == ("<bos>", "<eos>")
        assert tokenizer.eos_token_ids == {1, 106}
        assert tokenizer.encode("x") == [2, *tokenizer.encode("x", add_special_tokens=False)]


# --- BOS (A19) -------------------------------------------------------------------------------------------------------


def test_bos_is_added_by_the_models_own_setting_and_once():
    adds = Tokenizer.from_gguf(bytes_metadata(add_bos_token=True))
    assert adds.encode("hi") == [256, 258]
    assert adds.encode("hi", add_special_tokens=False) == [258]
    assert adds.encode("<s>hi") == [256, 258]  # the text has it already
    assert adds.encode("<s>hi", add_special_tokens=False) == [256, 258]  # a rendered chat
    assert adds.encode("") == [256]
    assert adds.encode("x<s>hi") == [256, 120, 256, 258]  # only at the start
    never = Tokenizer.from_gguf(bytes_metadata(add_bos_token=False))
    assert never.encode("hi") == [258] and never.encode("<s>hi") == [256, 258]
    assert not never.add_bos and never.bos_token == "<s>"
    no_bos = Tokenizer.from_gguf(bytes_metadata(bos_token_id=None))
    assert no_bos.encode("hi") == [258] and no_bos.bos_token_id is None and no_bos.bos_token == ""


def test_add_eos_is_the_models_own_setting():
    tokenizer = Tokenizer.from_gguf(bytes_metadata(add_eos_token=True))
    assert tokenizer.encode("hi") == [258, 257] and tokenizer.add_eos
    assert tokenizer.encode("hi", add_special_tokens=False) == [258]


def test_sentencepiece_files_add_bos_unless_they_say_no():
    assert Tokenizer.from_gguf(spm_metadata([BLANK, "a"])).add_bos
    assert not Tokenizer.from_gguf(spm_metadata([BLANK, "a"], add_bos_token=False)).add_bos


@pytest.mark.parametrize("key", ["add_bos_token", "add_eos_token"])
def test_a_flag_without_its_token_is_refused(key):
    token = f"{key[4:]}_id"
    with pytest.raises(TokenizerError, match=rf"{key}.*{token} is missing"):
        Tokenizer.from_gguf(bytes_metadata(**{key: True, token: None}))


# --- special tokens --------------------------------------------------------------------------------------------------


def test_control_and_user_tokens_are_found_whole_and_longest_first():
    metadata = bytes_metadata(["<a>", "<a><b>", "  ", "    "])
    metadata["tokenizer.ggml.token_type"][-4:] = [CONTROL, CONTROL, USER, USER]
    tokenizer = Tokenizer.from_gguf(metadata)
    assert tokenizer.encode("<a><b><a>x      y") == [260, 259, 120, 262, 261, 121]
    assert tokenizer.is_special(259) and not tokenizer.is_special(261) and not tokenizer.is_special(120)
    assert tokenizer.decode([259, 120, 261]) == "x  "
    assert tokenizer.decode([259, 120, 261], skip_special_tokens=False) == "<a>x  "


def test_known_turn_ends_are_control_and_end_a_generation():
    tokenizer = Tokenizer.from_gguf(bytes_metadata(["<|im_end|>", "<end_of_turn>"], eot_token_id=258))
    assert tokenizer.eos_token_ids == {257, 258, 259, 260}
    assert tokenizer.is_special(259) and tokenizer.encode("<|im_end|>") == [259]


def test_without_token_types_all_but_named_ids_are_plain():
    tokenizer = Tokenizer.from_gguf(bytes_metadata(token_type=None))
    assert tokenizer.encode("<s>hi") == [256, 258] and tokenizer.is_special(256) and not tokenizer.is_special(258)


# --- SentencePiece ---------------------------------------------------------------------------------------------------

PIECES = [BLANK + "the", BLANK + "t", "he", "in", BLANK + "in", "er", "the", BLANK + BLANK, "ab", "abc", "bc", "cab", BLANK, *"thieranbc"]


def sentencepiece_reference(text: str, pieces: list[str]) -> list[str]:
    """The definition: while two neighbours make a token, join the pair that makes the best one (leftmost of equals)."""
    rank = {piece: i for i, piece in reversed(list(enumerate(pieces)))}
    symbols = list(text)
    while True:
        joined = [(rank[a + b], i) for i, (a, b) in enumerate(pairwise(symbols)) if a + b in rank]
        if not joined:
            return symbols
        at = min(joined)[1]
        symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]


@settings(max_examples=300, deadline=None)
@given(text=st.text("thieranbc ", max_size=24), data=st.data())
def test_derived_merges_are_sentencepiece(text, data):
    # Any order of scores, also ones where a part is worse than the whole.
    pieces = data.draw(st.permutations(PIECES))
    tokenizer = Tokenizer.from_gguf(spm_metadata(pieces, add_space_prefix=False))
    got = [tokenizer._vocabulary.tokens[i] for i in tokenizer.encode(text, add_special_tokens=False)]
    assert got == sentencepiece_reference(text.replace(" ", BLANK), pieces)


@settings(max_examples=200, deadline=None)
@given(tokens=st.lists(st.text("ab中😀\u2581", min_size=1, max_size=6), max_size=40, unique=True))
def test_derived_merges_are_all_splits_in_order(tokens):
    known = set(tokens)
    expected = [(t[:k], t[k:]) for t in tokens for k in range(1, len(t)) if t[:k] in known and t[k:] in known]
    assert sentencepiece_merges.derive(tokens) == expected


def test_equal_scores_join_in_the_order_of_ids():
    metadata = spm_metadata(["a", "b", "c", "ab", "bc"], add_space_prefix=False, add_bos_token=False)
    metadata["tokenizer.ggml.scores"] = [0.0] * len(metadata["tokenizer.ggml.tokens"])
    assert Tokenizer.from_gguf(metadata).encode("abc") == [262, 261]
    metadata["tokenizer.ggml.scores"][263] = 1.0
    assert Tokenizer.from_gguf(metadata).encode("abc") == [259, 263]


def test_merges_in_the_file_win_over_scores():
    metadata = spm_metadata(["a", "b", "c", "ab", "bc"], add_space_prefix=False, add_bos_token=False, merges=["b c"])
    assert Tokenizer.from_gguf(metadata).encode("abc") == [259, 263]


def test_blank_before_the_first_word_and_after_special_tokens():
    prefixed = Tokenizer.from_gguf(spm_metadata([BLANK + "a", "a", BLANK], add_bos_token=False))
    assert prefixed.encode("a") == [259]
    assert prefixed.encode("a<s>a") == [259, 1, 259]  # as Llama 2 and Mistral tokenize
    assert prefixed.encode("") == []
    plain = Tokenizer.from_gguf(spm_metadata([BLANK + "a", "a", BLANK], add_bos_token=False, add_space_prefix=False))
    assert plain.encode("a a") == [260, 259]


def test_bytes_for_what_is_not_in_the_vocabulary():
    tokenizer = Tokenizer.from_gguf(spm_metadata(["a", BLANK], add_space_prefix=False, add_bos_token=False))
    assert tokenizer.encode("aé\x00\n") == [259, 3 + 0xC3, 3 + 0xA9, 3, 3 + 10]
    assert tokenizer.encode("<0x41>") != [3 + 0x41]  # the name of a byte token in text is text
    for text in NASTY_TEXTS:
        assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False) == text


def test_without_byte_tokens_the_unknown_token_stands_in():
    metadata = spm_metadata(["a", BLANK], byte_tokens=False, add_space_prefix=False, add_bos_token=False)
    assert Tokenizer.from_gguf(metadata).encode("aéüa") == [3, 0, 3]
    metadata["tokenizer.ggml.token_type"][0] = CONTROL
    del metadata["tokenizer.ggml.unknown_token_id"]
    with pytest.raises(TokenizerError, match="unknown_token_id: missing"):
        Tokenizer.from_gguf(metadata)


# --- Unicode traps ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("metadata", [bytes_metadata(), spm_metadata(["a", BLANK])], ids=["bytes", "spm"])
def test_lone_surrogates_are_refused_and_nul_is_text(metadata):
    tokenizer = Tokenizer.from_gguf(metadata)
    with pytest.raises(ValueError, match=r"U\+D83D at character 2"):
        tokenizer.encode("ab\ud83dc")
    assert tokenizer.decode(tokenizer.encode("a\x00b", add_special_tokens=False)) == "a\x00b"


def test_characters_without_a_token_are_left_out_with_a_warning(caplog):
    alphabet = byte_level_alphabet()
    missing = {0x07, 0xC3, 0xE4, 0xF1}
    tokens = [alphabet[byte] for byte in range(256) if byte not in missing]
    tokenizer = Tokenizer.from_gguf(gguf("gpt2", [*tokens, "ab"], [NORMAL] * 253, pre="gpt-2", merges=["a b"]))
    assert tokenizer.decode(tokenizer.encode("x\x07y")) == "xy"
    assert [record.message[:16] for record in caplog.records] == ["text has U+0007,"]
    for text, warned in {"é": True, "Ā": False, "中": True, "한": False, "\U00040000": True, "😀": False, "\x06": False}.items():
        caplog.clear()
        tokenizer.encode(text)
        assert bool(caplog.records) is warned, text


@pytest.mark.parametrize("token_id", [-1, 259, 2**40, 1.0, "1", None, True])
def test_ids_outside_the_vocabulary_are_refused(token_id):
    tokenizer = Tokenizer.from_gguf(bytes_metadata())
    stream = tokenizer.stream()
    for call in (tokenizer.token_text, tokenizer.token_bytes, tokenizer.is_special, lambda i: tokenizer.decode([104, i]), stream.push):
        with pytest.raises(ValueError, match=rf"token id {token_id!r} is not in the vocabulary; ids are integers from 0 to 258"):
            call(token_id)


def test_padding_rows_have_no_text():
    tokenizer = Tokenizer.from_gguf(bytes_metadata())
    tokenizer.pad_to(300)
    tokenizer.pad_to(10)  # never shrinks
    assert tokenizer.vocab_size == 300 and tokenizer.decode([104, 299, 105]) == "hi" and tokenizer.token_text(299) == ""
    with pytest.raises(ValueError, match="0 to 299"):
        tokenizer.decode([300])


@pytest.mark.parametrize("broken", [b"\xff\xfe", "\udcff\udcfe"], ids=["bytes", "surrogateescape"])
def test_tokens_that_are_not_utf8_keep_their_bytes(broken):
    tokenizer = Tokenizer.from_gguf(bytes_metadata([broken, "ok"]))
    assert tokenizer.token_bytes(259) == b"\xff\xfe" and tokenizer.token_text(259) == "\ufffd\ufffd"
    assert tokenizer.token_bytes(260) == b"ok" and tokenizer.encode("hi") == [258]


def test_equal_tokens_are_allowed_and_the_first_is_used():
    tokenizer = Tokenizer.from_gguf(bytes_metadata(["hi", "<s>"]))
    assert tokenizer.encode("hi<s>") == [258, 256] and tokenizer.token_text(259) == "hi"


# --- files that lie --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": None}, r"tokenizer\.ggml\.model: missing; .*gpt2, llama"),
        ({"model": "bert"}, r"tokenizer\.ggml\.model: 'bert'; .*gpt2, llama"),
        ({"model": "rwkv"}, r"'rwkv'.*gpt2, llama"),
        ({"model": "t5"}, r"'t5'.*gpt2, llama"),
        ({"tokens": None}, r"tokenizer\.ggml\.tokens: missing or empty"),
        ({"tokens": []}, r"tokenizer\.ggml\.tokens: missing or empty"),
        ({"tokens": "abc"}, r"tokenizer\.ggml\.tokens: a str; it is an array"),
        ({"tokens": ["a", 3]}, r"tokens: the entry at index 1 is 3"),
        ({"token_type": [1, 1]}, r"token_type has 2 entries but tokenizer\.ggml\.tokens has 259"),
        ({"token_type": [9] * 259}, r"token_type: 9 at index 0 is not allowed"),
        ({"token_type": ["x"] * 259}, r"token_type: 'x' at index 0"),
        ({"bos_token_id": 259}, r"bos_token_id: 259 is not allowed; .* 0 to 258"),
        ({"eos_token_id": -1}, r"eos_token_id: -1 is not allowed"),
        ({"eot_token_id": "7"}, r"eot_token_id: '7' is not allowed"),
        ({"unknown_token_id": True}, r"unknown_token_id: True is not allowed"),
        ({"add_bos_token": 1}, r"add_bos_token: 1 is not allowed"),
        ({"merges": ["hi"]}, r"merges: the entry at index 0 is 'hi'"),
        ({"merges": [5]}, r"merges: the entry at index 0 is 5"),
        ({"merges": ["h i", "h q"]}, r"merges: Token `hq` out of vocabulary"),
        ({"merges": 7}, r"merges: a int; it is an array"),
    ],
)
def test_byte_level_files_that_lie(change, message):
    with pytest.raises(TokenizerError, match=message):
        Tokenizer.from_gguf(bytes_metadata(**change))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scores": None}, r"tokenizer\.ggml\.scores: missing, as is tokenizer\.ggml\.merges"),
        ({"scores": [0.0]}, r"scores has 1 entries but tokenizer\.ggml\.tokens has 260"),
        ({"scores": [float("nan")] * 260}, r"scores: every score is a number"),
        ({"scores": ["x"] * 260}, r"scores: every score is a number"),
        ({"add_space_prefix": "no"}, r"add_space_prefix: 'no' is not allowed"),
        ({"merges": ["a q"]}, r"merges: Token `q` out of vocabulary"),
    ],
)
def test_sentencepiece_files_that_lie(change, message):
    with pytest.raises(TokenizerError, match=message):
        Tokenizer.from_gguf(spm_metadata(["a"], **change))


def test_chat_template_is_a_string_or_absent():
    metadata = bytes_metadata()
    assert Tokenizer.from_gguf(metadata).chat_template_source is None
    assert Tokenizer.from_gguf({**metadata, "tokenizer.chat_template": "{{ 1 }}"}).chat_template_source == "{{ 1 }}"
    with pytest.raises(TokenizerError, match="chat_template: a int"):
        Tokenizer.from_gguf({**metadata, "tokenizer.chat_template": 3})
