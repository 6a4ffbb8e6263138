"""A tokenizer from a folder as model hubs hold it: tokenizer.json and the settings files beside it.

Owns finding those settings. tokenizer.json is run by the library that defines it; only its way of spelling bytes must be one
that ``Vocabulary`` knows, because all decoding is made from token bytes.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo.models.vocabulary import END_OF_TURN_TEXTS, Spelling, TokenizerError, TokenizerParts, TokenKind, Vocabulary

if TYPE_CHECKING:
    import tokenizers

_PROBE = "a"  # a text around which the model's own special tokens show


def build(path: str | os.PathLike[str]) -> TokenizerParts:
    """Encoder, vocabulary and settings from a folder; TokenizerError names the file at fault.

    BOS: ``add_bos_token`` of tokenizer_config.json where it is set, else what tokenizer.json's own post-processor does.
    End of sequence: the tokenizer's eos_token, ``eos_token_id`` of generation_config.json and config.json, and the known texts
    that end a chat turn.
    """
    from tokenizers import Tokenizer

    folder = Path(path)
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise TokenizerError(f"{file}: missing; a folder needs tokenizer.json (a tokenizer.model alone cannot be read)")
    try:
        encoder = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises bare Exception
        raise TokenizerError(f"{file}: not a tokenizer the `tokenizers` library can load: {error}") from None
    spelling, strip_first_blank = _spelling(encoder, file)
    parts = TokenizerParts(encoder, _read_vocabulary(encoder, spelling), strip_first_blank=strip_first_blank)
    config = {**_json(folder / "special_tokens_map.json"), **_json(folder / "tokenizer_config.json")}
    parts.bos_token_id = _named_token(encoder, config, "bos_token")
    parts.eos_token_id = _named_token(encoder, config, "eos_token")
    parts.eos_token_ids = _end_ids(parts, folder)
    for token_id in (parts.bos_token_id, *parts.eos_token_ids):
        if token_id is not None:
            parts.vocabulary.kinds[token_id] = TokenKind.CONTROL
    _read_around(parts, config)
    parts.chat_template_source = _chat_template(folder, config)
    return parts


def _json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        value = json.loads(file.read_text("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise TokenizerError(f"{file}: not JSON: {error}") from None
    if not isinstance(value, dict):
        raise TokenizerError(f"{file}: not a JSON object")
    return {key: item for key, item in value.items() if item is not None}


def _steps(component: Any) -> list[dict[str, Any]]:
    """A normaliser, splitter or decoder as the flat list of its steps."""
    if component is None:
        return []
    state = json.loads(component.__getstate__())
    return state.get("decoders") or state.get("pretokenizers") or state.get("normalizers") or [state]


def _spelling(encoder: tokenizers.Tokenizer, file: Path) -> tuple[Spelling, bool]:
    """How tokens spell bytes, and whether decoding takes a blank off the start of the text."""
    decoder = _steps(encoder.decoder)
    kinds = {step["type"] for step in decoder}
    if kinds == {"ByteLevel"}:
        return Spelling.BYTE_LEVEL, False
    if "Metaspace" in kinds:
        return Spelling.SENTENCEPIECE, any(step.get("prepend_scheme", "always") != "never" for step in decoder)
    if kinds and kinds <= {"Replace", "ByteFallback", "Fuse", "Strip"}:
        return Spelling.SENTENCEPIECE, any(step["type"] == "Strip" and step["content"] == " " and step["start"] == 1 for step in decoder)
    found = ", ".join(sorted(kinds)) or "none"
    raise TokenizerError(f"{file}: decoder {found} is not known; known: ByteLevel, Metaspace, Replace + ByteFallback + Fuse (+ Strip)")


def _read_vocabulary(encoder: tokenizers.Tokenizer, spelling: Spelling) -> Vocabulary:
    ids_by_text = encoder.get_vocab(with_added_tokens=True)
    added = encoder.get_added_tokens_decoder()
    size = max([*ids_by_text.values(), *added], default=-1) + 1
    tokens: list[str | None] = [None] * size
    kinds = bytearray([TokenKind.UNUSED]) * size
    for text, token_id in ids_by_text.items():
        tokens[token_id], kinds[token_id] = text, TokenKind.NORMAL
    if spelling is Spelling.SENTENCEPIECE and getattr(encoder.model, "byte_fallback", False):
        for byte in range(256):
            if (name := f"<0x{byte:02X}>") in ids_by_text:
                kinds[ids_by_text[name]] = TokenKind.BYTE
    for token_id, token in added.items():
        tokens[token_id], kinds[token_id] = token.content, TokenKind.CONTROL if token.special else TokenKind.USER_DEFINED
    return Vocabulary(tokens, kinds, spelling)


def _named_token(encoder: tokenizers.Tokenizer, config: Mapping[str, Any], key: str) -> int | None:
    value = config.get(key)
    text = value.get("content") if isinstance(value, dict) else value
    if text is None:
        return None
    token_id = encoder.token_to_id(text) if isinstance(text, str) else None
    if token_id is None:
        raise TokenizerError(f"{key}: {value!r} is not a token of tokenizer.json")
    return token_id


def _end_ids(parts: TokenizerParts, folder: Path) -> frozenset[int]:
    ids = {parts.encoder.token_to_id(text) for text in END_OF_TURN_TEXTS} | {parts.eos_token_id}
    for name in ("generation_config.json", "config.json"):
        value = _json(folder / name).get("eos_token_id")
        for token_id in value if isinstance(value, list) else [value]:
            if token_id is not None and (type(token_id) is not int or not 0 <= token_id < len(parts.vocabulary)):
                raise TokenizerError(f"{folder / name}: eos_token_id {token_id!r} is not a token; ids are 0 to {len(parts.vocabulary) - 1}")
            ids.add(token_id)
    return frozenset(token_id for token_id in ids if token_id is not None)


def _read_around(parts: TokenizerParts, config: Mapping[str, Any]) -> None:
    """What goes before and after a prompt."""
    plain = parts.encoder.encode(_PROBE, add_special_tokens=False).ids
    whole = parts.encoder.encode(_PROBE, add_special_tokens=True).ids
    start = next((i for i in range(len(whole) - len(plain) + 1) if whole[i : i + len(plain)] == plain), 0)
    prefix, suffix = list(whole[:start]), list(whole[start + len(plain) :])
    for key, token_id, around in (("add_bos_token", parts.bos_token_id, prefix), ("add_eos_token", parts.eos_token_id, suffix)):
        wanted = config.get(key)
        if wanted is False:
            around[:] = [i for i in around if i != token_id]
        elif wanted is True and token_id not in around:
            if token_id is None:
                raise TokenizerError(f"tokenizer_config.json: {key} is true, but {key[4:]} is missing")
            around.insert(0, token_id)
    parts.prefix_ids, parts.suffix_ids = tuple(prefix), tuple(suffix)


def _chat_template(folder: Path, config: Mapping[str, Any]) -> str | None:
    """chat_template.jinja, else chat_template of tokenizer_config.json; of several named ones "default"."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text("utf-8-sig")
    template = config.get("chat_template")
    if isinstance(template, list):
        template = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}.get("default")
    if template is not None and not isinstance(template, str):
        raise TokenizerError(f"{folder / 'tokenizer_config.json'}: chat_template is a {type(template).__name__}; it is a string or a list")
    return template
