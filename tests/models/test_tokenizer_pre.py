"""Every splitting rule against the `tokenizers` library running that family's own tokenizer.json definition."""

from __future__ import annotations

import json
import logging

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as HFTokenizer
from tokenizers import models

from octavo.models.pretokenizers import PRE_TOKENIZERS
from octavo.models.tokenizer import Tokenizer
from octavo.models.vocabulary import TokenizerError

from .vocabularies import CONTROL, NASTY_TEXTS, NORMAL, gguf, trained_metadata

LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
QWEN2 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
BYTES_GPT2 = {**BYTES, "use_regex": True}  # the library's own copy of GPT-2's expression
DIGITS = {"type": "Digits", "individual_digits": True}


def split(pattern: str) -> dict:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


# As the families' tokenizer.json files have it: (normalizer, pre-tokenizer steps, ignore_merges)
FAMILIES = {
    "gpt-2": (None, [BYTES_GPT2], False),
    "default": (None, [BYTES_GPT2], False),
    "smollm": (None, [DIGITS, BYTES_GPT2], False),
    "starcoder": (None, [DIGITS, BYTES_GPT2], False),
    "refact": (None, [DIGITS, BYTES_GPT2], False),
    "llama-bpe": (None, [split(LLAMA3), BYTES], True),
    "llama3": (None, [split(LLAMA3), BYTES], True),
    "llama-v3": (None, [split(LLAMA3), BYTES], True),
    "qwen2": ({"type": "NFC"}, [split(QWEN2), BYTES], False),
    "deepseek-r1-qwen": ({"type": "NFC"}, [split(QWEN2), BYTES], False),
    "tekken": (None, [split(TEKKEN), BYTES], True),
    "deepseek-llm": (
        None,
        [
            split("[\r\n]"),
            split(r"\s?[\p{Lu}\p{Ll}\p{Lt}]+"),  # the file lists these letters one by one, as of an older Unicode
            split("\\s?[!-/:-~！-／：-～‘-‟　-。]+"),
            split("\\s+$"),
            split("[一-龥ࠀ-一가-\ud7ff]+"),
            DIGITS,
            BYTES,
        ],
        False,
    ),
    "deepseek-coder": (
        None,
        [split("[\r\n]"), split("\\s?\\p{L}+"), split("\\s?\\p{P}+"), split("[一-龥ࠀ-一가-\ud7ff]+"), DIGITS, BYTES],
        False,
    ),
}


def reference(pre: str) -> HFTokenizer:
    normalizer, steps, ignore_merges = FAMILIES[pre]
    empty = json.loads(HFTokenizer(models.BPE({}, [], ignore_merges=ignore_merges)).to_str())
    whole = {**empty, "normalizer": normalizer, "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps}}
    return HFTokenizer.from_str(json.dumps(whole))


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def pair(request):
    theirs = reference(request.param)
    metadata = trained_metadata(theirs, request.param, NASTY_TEXTS)
    return theirs, Tokenizer.from_gguf(metadata)


def test_every_known_name_is_tested():
    assert set(FAMILIES) == set(PRE_TOKENIZERS)


def test_same_ids_on_nasty_texts(pair):
    theirs, ours = pair
    for text in [*NASTY_TEXTS, "".join(NASTY_TEXTS), " ".join(reversed(NASTY_TEXTS))]:
        assert ours.encode(text, add_special_tokens=False) == theirs.encode(text, add_special_tokens=False).ids, text


LETTERS = st.sampled_from(list("aAzZ'sStTlLdDmM 0123456789 \t\n\r\u00a0\u3000.,!?/-_$=<>#éÉßµǅΩωЖж中文のカ한글😀\u0301\u064e²½Ⅷ"))


@settings(max_examples=60, deadline=None)
@given(text=st.text(LETTERS, max_size=40))
def test_same_ids_on_random_texts(pair, text):
    theirs, ours = pair
    assert ours.encode(text, add_special_tokens=False) == theirs.encode(text, add_special_tokens=False).ids


def test_round_trip(pair):
    theirs, ours = pair
    composes = theirs.normalizer is not None
    for text in NASTY_TEXTS:
        decoded = ours.decode(ours.encode(text, add_special_tokens=False), skip_special_tokens=False)
        assert decoded == (theirs.normalizer.normalize_str(text) if composes else text)


@pytest.mark.parametrize("pre", sorted(PRE_TOKENIZERS))
def test_whole_token_that_merges_do_not_make(pre):
    """ignore_merges families take "abc" whole; the others can only merge."""
    metadata = gguf("gpt2", ["a", "b", "c", "ab", "abc"], [NORMAL] * 5, pre=pre, merges=["a b"])
    whole = pre in ("llama-bpe", "llama3", "llama-v3", "tekken")
    assert Tokenizer.from_gguf(metadata).encode("abc") == ([4] if whole else [3, 2])


@pytest.mark.parametrize("pre", sorted(PRE_TOKENIZERS))
def test_default_of_add_bos_comes_with_the_name(pre):
    metadata = gguf("gpt2", ["a", "b", "<s>"], [NORMAL, NORMAL, CONTROL], pre=pre, merges=["a b"], bos_token_id=2)
    metadata["tokenizer.ggml.tokens"].append("ab")
    metadata["tokenizer.ggml.token_type"].append(NORMAL)
    expected = pre in ("llama-bpe", "llama3", "llama-v3", "tekken")
    assert Tokenizer.from_gguf(metadata).add_bos is expected
    for given_flag in (True, False):  # the file's own word wins
        assert Tokenizer.from_gguf({**metadata, "tokenizer.ggml.add_bos_token": given_flag}).add_bos is given_flag


@pytest.mark.parametrize("pre", ["no-such-family", None])
def test_unknown_name_warns_and_splits_as_gpt2(pre, caplog):
    theirs = reference("gpt-2")
    metadata = trained_metadata(theirs, pre, NASTY_TEXTS)
    with caplog.at_level(logging.WARNING):
        ours = Tokenizer.from_gguf(metadata)
    [record] = caplog.records
    assert "tokenizer.ggml.pre" in record.message and "gpt-2" in record.message and (pre or "(absent)") in record.message
    for text in NASTY_TEXTS:
        assert ours.encode(text, add_special_tokens=False) == theirs.encode(text, add_special_tokens=False).ids


def test_missing_merges_are_refused_by_name():
    for merges in (None, []):
        with pytest.raises(TokenizerError, match=r"tokenizer\.ggml\.merges"):
            Tokenizer.from_gguf(gguf("gpt2", ["a"], [NORMAL], pre="gpt-2", merges=merges))
