"""Tokenizers from tokenizer.json folders, against the `tokenizers` library itself."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as HFTokenizer

from octavo.models.tokenizer import Tokenizer
from octavo.models.vocabulary import TokenizerError

from .vocabularies import BLANK, NASTY_TEXTS, spm_metadata, trained_metadata


def byte_level() -> HFTokenizer:
    hf = HFTokenizer(models.BPE({}, []))
    hf.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    hf.decoder = decoders.ByteLevel()
    trained_metadata(hf, "gpt-2", NASTY_TEXTS)
    hf.add_special_tokens([AddedToken("<s>", normalized=False), AddedToken("<|im_end|>", normalized=False)])
    hf.add_tokens([AddedToken("<note>", normalized=False)])
    return hf


def sentencepiece(metaspace: bool) -> HFTokenizer:
    metadata = spm_metadata([BLANK + "a", BLANK, "a", "b", "ab"])
    vocab = {token: i for i, token in enumerate(metadata["tokenizer.ggml.tokens"])}
    hf = HFTokenizer(models.BPE(vocab, [(BLANK, "a"), ("a", "b")], unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    if metaspace:
        hf.pre_tokenizer = pre_tokenizers.Metaspace(replacement=BLANK, prepend_scheme="first", split=False)
        blanks = decoders.Metaspace(replacement=BLANK, prepend_scheme="first")
        hf.decoder = decoders.Sequence([decoders.ByteFallback(), blanks, decoders.Fuse()])
    else:
        hf.normalizer = normalizers.Sequence([normalizers.Prepend(BLANK), normalizers.Replace(" ", BLANK)])
        hf.decoder = decoders.Sequence([decoders.Replace(BLANK, " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    hf.add_special_tokens([AddedToken(token, normalized=False) for token in ("<unk>", "<s>", "</s>")])
    return hf


def folder(path: Path, hf: HFTokenizer, **files: object) -> Path:
    hf.save(str(path / "tokenizer.json"))
    for name, value in files.items():
        (path / f"{name}.json").write_text(json.dumps(value), "utf-8")
    return path


@pytest.mark.parametrize("make", [byte_level, lambda: sentencepiece(False), lambda: sentencepiece(True)], ids=["bytes", "spm", "metaspace"])
def test_ids_and_texts_are_the_librarys(tmp_path, make):
    hf = make()
    tokenizer = Tokenizer.from_folder(folder(tmp_path, hf))
    assert tokenizer.vocab_size == hf.get_vocab_size(with_added_tokens=True)
    for text in [*NASTY_TEXTS, "a b ab  a", "<s>a</s> b<note>c"]:
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert ids == hf.encode(text, add_special_tokens=False).ids
        for skip in (True, False):
            assert tokenizer.decode(ids, skip) == hf.decode(ids, skip_special_tokens=skip)
            stream = tokenizer.stream((), skip)
            assert "".join(map(stream.push, ids)) + stream.flush() == tokenizer.decode(ids, skip)


def test_settings_files(tmp_path):
    hf = byte_level()
    path = folder(
        tmp_path,
        hf,
        tokenizer_config={"bos_token": {"content": "<s>"}, "eos_token": "<|im_end|>", "chat_template": "{{ 1 }}", "pad_token": None},
        generation_config={"eos_token_id": [3, 4]},
        config={"eos_token_id": 5},
    )
    tokenizer = Tokenizer.from_folder(path)
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<s>", "<|im_end|>")
    assert tokenizer.eos_token_ids == {3, 4, 5, hf.token_to_id("<|im_end|>")}
    assert tokenizer.is_special(tokenizer.bos_token_id) and not tokenizer.is_special(hf.token_to_id("<note>"))
    assert tokenizer.chat_template_source == "{{ 1 }}" and not tokenizer.add_bos
    (path / "chat_template.jinja").write_text("{{ 2 }}", "utf-8")
    assert Tokenizer.from_folder(path).chat_template_source == "{{ 2 }}"


def test_special_tokens_map_is_second_choice_and_named_templates_have_a_default(tmp_path):
    named = [{"name": "rag", "template": "R"}, {"name": "default", "template": "D"}]
    path = folder(
        tmp_path,
        byte_level(),
        special_tokens_map={"bos_token": "<s>", "eos_token": "<s>"},
        tokenizer_config={"eos_token": "<|im_end|>", "chat_template": named},
    )
    tokenizer = Tokenizer.from_folder(path)
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.chat_template_source) == ("<s>", "<|im_end|>", "D")


@pytest.mark.parametrize(("flag", "expected"), [(None, True), (True, True), (False, False)])
def test_bos_by_post_processor_unless_the_config_says(tmp_path, flag, expected):
    hf = byte_level()
    bos = hf.token_to_id("<s>")
    hf.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", bos)])
    tokenizer = Tokenizer.from_folder(folder(tmp_path, hf, tokenizer_config={"bos_token": "<s>", "add_bos_token": flag}))
    assert tokenizer.add_bos is expected
    plain = tokenizer.encode("hello", add_special_tokens=False)
    assert tokenizer.encode("hello") == ([bos, *plain] if expected else plain)
    assert tokenizer.encode("<s>hello") == [bos, *plain]  # once


def test_add_bos_of_the_config_without_a_post_processor(tmp_path):
    hf = byte_level()
    config = {"bos_token": "<s>", "eos_token": "<|im_end|>", "add_bos_token": True, "add_eos_token": True}
    tokenizer = Tokenizer.from_folder(folder(tmp_path, hf, tokenizer_config=config))
    assert tokenizer.encode("hi") == [hf.token_to_id("<s>"), *tokenizer.encode("hi", False), hf.token_to_id("<|im_end|>")]


def test_truncation_and_padding_of_the_file_do_not_apply(tmp_path):
    hf = byte_level()
    hf.enable_truncation(4)
    hf.enable_padding(length=50)
    assert len(hf.encode("x").ids) == 50
    tokenizer = Tokenizer.from_folder(folder(tmp_path, hf))
    text = "one two three four five six"
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_gaps_between_ids_have_no_text(tmp_path):
    state = json.loads(byte_level().to_str())
    added = state["added_tokens"][-1]
    gap = added["id"]
    added["id"] = gap + 3
    state["model"]["vocab"][added["content"]] = gap + 3
    (tmp_path / "tokenizer.json").write_text(json.dumps(state), "utf-8")
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.vocab_size == gap + 4 and tokenizer.decode([gap, gap + 3]) == "<note>"


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "tokenizer.json: missing"),
        ({"tokenizer.json": "{"}, "tokenizer.json: not a tokenizer"),
        ({"tokenizer_config.json": "{"}, "tokenizer_config.json: not JSON"),
        ({"tokenizer_config.json": "[]"}, "tokenizer_config.json: not a JSON object"),
        ({"tokenizer_config.json": '{"bos_token": "<nope>"}'}, "bos_token: '<nope>' is not a token"),
        ({"tokenizer_config.json": '{"chat_template": 1}'}, "chat_template is a int"),
        ({"tokenizer_config.json": '{"add_bos_token": true}'}, "add_bos_token is true, but bos_token is missing"),
        ({"generation_config.json": '{"eos_token_id": 99999}'}, "generation_config.json: eos_token_id 99999 is not a token"),
        ({"config.json": '{"eos_token_id": "2"}'}, "config.json: eos_token_id '2' is not a token"),
    ],
)
def test_folders_that_do_not_fit(tmp_path, files, message):
    if files:
        folder(tmp_path, byte_level())
    for name, text in files.items():
        (tmp_path / name).write_text(text, "utf-8")
    with pytest.raises(TokenizerError, match=message):
        Tokenizer.from_folder(tmp_path)


def test_a_decoder_that_is_not_known_is_refused(tmp_path):
    hf = byte_level()
    hf.decoder = decoders.WordPiece()
    with pytest.raises(TokenizerError, match="decoder WordPiece is not known; known: ByteLevel, Metaspace"):
        Tokenizer.from_folder(folder(tmp_path, hf))
