"""A tokenizer from the metadata of a GGUF file.

Owns the reading and cross-checking of ``tokenizer.ggml.*`` and the assembly of an encoder from it. The file is untrusted:
every array is checked against the others before use. Knows two kinds: byte-level BPE ("gpt2", split by ``tokenizer.ggml.pre``)
and SentencePiece BPE with byte fallback ("llama": Llama 2, Mistral, Gemma). Anything else is refused by name.
"""

from __future__ import annotations

import gc
import operator
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from octavo.models import sentencepiece_merges
from octavo.models.pretokenizers import PreTokenizer, pre_tokenizer
from octavo.models.vocabulary import BLANK, END_OF_TURN_TEXTS, Spelling, TokenizerError, TokenizerParts, TokenKind, Vocabulary

_P = "tokenizer.ggml."
_END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
KNOWN_MODELS = ("gpt2", "llama")
_MERGED = frozenset(map(int, (TokenKind.UNDEFINED, TokenKind.NORMAL)))  # plain ints: enum members compare slowly
_WHOLE = frozenset(map(int, (TokenKind.CONTROL, TokenKind.UNKNOWN, TokenKind.USER_DEFINED)))


def build(metadata: Mapping[str, Any]) -> TokenizerParts:
    """Encoder, vocabulary and settings from GGUF metadata; TokenizerError names the key that is missing or does not fit.

    Encoding needs no cache on disk: 0.05 s for 49,152 byte-level tokens, 0.9 s for Gemma's 262,144.
    """
    model = metadata.get(_P + "model")
    if model not in KNOWN_MODELS:
        found = "missing" if model is None else repr(model)
        raise TokenizerError(f"{_P}model: {found}; tokenizers of these kinds can be built: {', '.join(KNOWN_MODELS)}")
    with _collector_paused():
        vocabulary = _read_vocabulary(metadata, Spelling.BYTE_LEVEL if model == "gpt2" else Spelling.SENTENCEPIECE)
        ids_by_text = _ids_by_text(vocabulary)
        turn_ends = [ids_by_text[text] for text in END_OF_TURN_TEXTS if text in ids_by_text]
        for token_id in turn_ends:
            vocabulary.kinds[token_id] = TokenKind.CONTROL
        if model == "gpt2":
            family = pre_tokenizer(metadata.get(_P + "pre"))
            parts = TokenizerParts(_byte_level_encoder(metadata, ids_by_text, family), vocabulary)
            add_bos = family.add_bos
        else:
            prefix_blank = _flag(metadata, "add_space_prefix", default=True)
            encoder = _sentencepiece_encoder(metadata, vocabulary, ids_by_text, prefix_blank)
            parts = TokenizerParts(encoder, vocabulary, strip_first_blank=prefix_blank)
            add_bos = True
        _add_whole_tokens(parts)
    _read_settings(metadata, parts, add_bos)
    parts.eos_token_ids |= frozenset(turn_ends)
    return parts


@contextmanager
def _collector_paused() -> Iterator[None]:
    """Half a million tuples and no cycles: the collector would only walk them again and again."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _read_vocabulary(metadata: Mapping[str, Any], spelling: Spelling) -> Vocabulary:
    raw = _array(metadata, "tokens")
    if not raw:
        raise TokenizerError(f"{_P}tokens: missing or empty; the file has no vocabulary")
    tokens = _as_text(raw)
    kinds = _array(metadata, "token_type") or [TokenKind.NORMAL] * len(tokens)
    _same_length("token_type", kinds, tokens)
    unknown = set(kinds) - set(TokenKind)
    if unknown:
        index = next(i for i, kind in enumerate(kinds) if kind in unknown)
        raise TokenizerError(f"{_P}token_type: {kinds[index]!r} at index {index} is not allowed; kinds are 0 to {max(TokenKind)}")
    vocabulary = Vocabulary(tokens, kinds, spelling)
    for key in ("bos_token_id", *_END_KEYS):
        if (token_id := _token_id(metadata, key, vocabulary)) is not None:
            vocabulary.kinds[token_id] = TokenKind.CONTROL
    unknown_id = _token_id(metadata, "unknown_token_id", vocabulary)
    if unknown_id is not None and kinds[unknown_id] in (TokenKind.UNDEFINED, TokenKind.NORMAL):
        vocabulary.kinds[unknown_id] = TokenKind.UNKNOWN
    return vocabulary


def _as_text(raw: Sequence[Any]) -> list[str | bytes]:
    """Token texts; bytes where a token is not valid UTF-8 (given as bytes or with surrogate escapes)."""
    if set(map(type, raw)) == {str}:
        try:
            "".join(raw).encode("utf-8")
            return list(raw)
        except UnicodeEncodeError:
            pass
    tokens: list[str | bytes] = []
    for index, token in enumerate(raw):
        try:
            data = token.encode("utf-8", "surrogateescape") if isinstance(token, str) else bytes(memoryview(token))
        except (TypeError, UnicodeEncodeError):
            raise TokenizerError(f"{_P}tokens: the entry at index {index} is {token!r}; tokens are strings") from None
        try:
            tokens.append(data.decode("utf-8"))
        except UnicodeDecodeError:
            tokens.append(data)
    return tokens


def _ids_by_text(vocabulary: Vocabulary) -> dict[str, int]:
    """Token text -> id; of equal texts the first wins. A token that is not UTF-8 gets a name that no text can spell."""
    names = vocabulary.tokens
    if bytes in set(map(type, names)):
        names = [f"\0invalid UTF-8 {token.hex()}" if isinstance(token, bytes) else token for token in names]
    return dict(zip(reversed(names), range(len(names) - 1, -1, -1), strict=True))  # type: ignore[arg-type]


def _byte_level_encoder(metadata: Mapping[str, Any], ids_by_text: dict[str, int], family: PreTokenizer) -> Any:
    from tokenizers import Tokenizer, normalizers

    merges = _read_merges(metadata)
    if merges is None:
        raise TokenizerError(f"{_P}merges: missing; a byte-level BPE vocabulary cannot be used without its merges")
    encoder = Tokenizer(_bpe(ids_by_text, merges, ignore_merges=family.ignore_merges))
    if family.nfc:
        encoder.normalizer = normalizers.NFC()
    encoder.pre_tokenizer = family.splitter()
    return encoder


def _sentencepiece_encoder(metadata: Mapping[str, Any], vocabulary: Vocabulary, ids_by_text: dict[str, int], prefix_blank: bool) -> Any:
    """Blanks become U+2581 and the whole text is one piece, as SentencePiece does it; a blank goes before each stretch of text if asked."""
    from tokenizers import Tokenizer, normalizers

    merges = _read_merges(metadata)
    if merges is None:
        merges = _derived_merges(metadata, vocabulary)
    unknown = _token_id(metadata, "unknown_token_id", vocabulary)
    if unknown is None:
        unknown = next((i for i, kind in enumerate(vocabulary.kinds) if kind == TokenKind.UNKNOWN), None)
    if unknown is None and not vocabulary.byte_tokens_complete():
        raise TokenizerError(f"{_P}unknown_token_id: missing, and not every byte has a token <0xNN>; some text could not be encoded")
    unknown_text = None if unknown is None else vocabulary.text_of(unknown)
    encoder = Tokenizer(_bpe(ids_by_text, merges, byte_fallback=True, fuse_unk=True, unk_token=unknown_text))
    blanks = normalizers.Replace(" ", BLANK)
    encoder.normalizer = normalizers.Sequence([normalizers.Prepend(BLANK), blanks]) if prefix_blank else blanks
    return encoder


def _derived_merges(metadata: Mapping[str, Any], vocabulary: Vocabulary) -> list[tuple[str, str]]:
    """SentencePiece joins the adjacent pair that makes the best-scored token; as merges: every split of a token into two tokens."""
    scores = _array(metadata, "scores")
    if not scores:
        raise TokenizerError(f"{_P}scores: missing, as is {_P}merges; one of them must say which tokens are joined first")
    _same_length("scores", scores, vocabulary.tokens)
    if not set(map(type, scores)) <= {int, float} or any(map(operator.ne, scores, scores)):  # NaN alone differs from itself
        raise TokenizerError(f"{_P}scores: every score is a number")
    tokens, kinds = vocabulary.tokens, vocabulary.kinds
    ids = [i for i, kind in enumerate(kinds) if kind in _MERGED and tokens[i] and isinstance(tokens[i], str)]
    ids.sort(key=scores.__getitem__, reverse=True)  # a stable sort, reversed or not: of equal scores the lower id is joined first
    return sentencepiece_merges.derive([tokens[i] for i in ids])  # type: ignore[misc]


def _read_merges(metadata: Mapping[str, Any]) -> list[tuple[str, str]] | None:
    raw = _array(metadata, "merges")
    if not raw:
        return None
    merges = []
    for index, merge in enumerate(raw):
        if isinstance(merge, (bytes, bytearray)):
            merge = merge.decode("utf-8", "replace")
        blank = merge.find(" ", 1) if isinstance(merge, str) else -1  # a token may itself begin with a blank
        if blank <= 0:
            raise TokenizerError(f"{_P}merges: the entry at index {index} is {merge!r}; a merge is two tokens with a blank between them")
        merges.append((merge[:blank], merge[blank + 1 :]))
    return merges


def _bpe(ids_by_text: dict[str, int], merges: list[tuple[str, str]], **options: Any) -> Any:
    from tokenizers.models import BPE

    try:
        return BPE(ids_by_text, merges, **options)
    except Exception as error:  # the library raises bare Exception: a merge names a token that is not there
        raise TokenizerError(f"{_P}merges: {str(error).removeprefix('Error while initializing BPE: ')}") from None


def _add_whole_tokens(parts: TokenizerParts) -> None:
    """Control and user-defined tokens are found in text before anything is split, longest first."""
    from tokenizers import AddedToken

    control: list[AddedToken] = []
    user: list[AddedToken] = []
    tokens, kinds = parts.vocabulary.tokens, parts.vocabulary.kinds
    for token, kind in [(tokens[i], kind) for i, kind in enumerate(kinds) if kind in _WHOLE]:
        if token and isinstance(token, str):
            special = kind != TokenKind.USER_DEFINED
            (control if special else user).append(AddedToken(token, normalized=False, special=special))
    parts.encoder.add_special_tokens(control)
    parts.encoder.add_tokens(user)


def _read_settings(metadata: Mapping[str, Any], parts: TokenizerParts, add_bos: bool) -> None:
    vocabulary = parts.vocabulary
    parts.bos_token_id = _token_id(metadata, "bos_token_id", vocabulary)
    parts.eos_token_id = _token_id(metadata, "eos_token_id", vocabulary)
    named = {_token_id(metadata, key, vocabulary) for key in _END_KEYS} - {None}
    parts.eos_token_ids = frozenset(named)  # type: ignore[arg-type]
    for key, default, token_id, name in (
        ("add_bos_token", add_bos, parts.bos_token_id, "prefix_ids"),
        ("add_eos_token", False, parts.eos_token_id, "suffix_ids"),
    ):
        if _flag(metadata, key, default):
            if token_id is not None:
                setattr(parts, name, (token_id,))
            elif _P + key in metadata:
                raise TokenizerError(f"{_P}{key}: true, but {_P}{key[4:]}_id is missing")
    template = metadata.get("tokenizer.chat_template")
    if template is not None and not isinstance(template, str):
        raise TokenizerError(f"tokenizer.chat_template: a {type(template).__name__} is not a template; it is a string")
    parts.chat_template_source = template


def _array(metadata: Mapping[str, Any], key: str) -> list[Any]:
    value = metadata.get(_P + key)
    if value is None:
        return []
    if isinstance(value, (str, bytes)) or not hasattr(value, "__len__"):
        raise TokenizerError(f"{_P}{key}: a {type(value).__name__}; it is an array")
    return value.tolist() if hasattr(value, "tolist") else list(value)


def _same_length(key: str, values: Sequence[Any], tokens: Sequence[Any]) -> None:
    if len(values) != len(tokens):
        raise TokenizerError(f"{_P}{key} has {len(values)} entries but {_P}tokens has {len(tokens)}")


def _flag(metadata: Mapping[str, Any], key: str, default: bool) -> bool:
    value = metadata.get(_P + key, default)
    if not isinstance(value, bool):
        raise TokenizerError(f"{_P}{key}: {value!r} is not allowed; true or false")
    return value


def _token_id(metadata: Mapping[str, Any], key: str, vocabulary: Vocabulary) -> int | None:
    value = metadata.get(_P + key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < len(vocabulary):
        raise TokenizerError(f"{_P}{key}: {value!r} is not allowed; token ids of this file are 0 to {len(vocabulary) - 1}")
    return value
