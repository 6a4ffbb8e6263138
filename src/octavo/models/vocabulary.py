"""The tokens of a model and the bytes each one stands for.

Owns how token texts are spelt in files (byte-level alphabet, U+2581 for a blank, ``<0xNN>`` byte tokens) and nothing else:
it never splits or merges text. All decoding, streamed or not, is made from ``Vocabulary.bytes_of``.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import tokenizers

BLANK = "\u2581"  # SentencePiece writes a blank as this character

# Texts by which chat models end a turn. A token with such a text is a control token whatever its file says, and ends
# generation beside the file's own end-of-sequence ids (llama.cpp's loader keeps the same kind of list).
END_OF_TURN_TEXTS = frozenset({"<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>"})


class TokenizerError(ValueError):
    """Tokenizer data that cannot be used, or text or ids outside what a tokenizer knows. The message names the key and the value."""


class TokenKind(IntEnum):
    """What a token is; the values are GGUF's ``tokenizer.ggml.token_type``."""

    UNDEFINED = 0  # treated as NORMAL
    NORMAL = 1
    UNKNOWN = 2  # stands for text outside the vocabulary
    CONTROL = 3  # special: parsed from text whole, hidden by skip_special_tokens
    USER_DEFINED = 4  # parsed from text whole, shown as text
    UNUSED = 5
    BYTE = 6  # <0xNN>


_SPECIAL = frozenset({TokenKind.CONTROL, TokenKind.UNKNOWN})


class Spelling(IntEnum):
    """How ordinary tokens write their bytes."""

    BYTE_LEVEL = 0  # GPT-2's alphabet: one printable character per byte
    SENTENCEPIECE = 1  # plain text with U+2581 for a blank


def byte_level_alphabet() -> list[str]:
    """GPT-2's character for each of the 256 bytes: printable Latin-1 stands for itself, the rest for U+0100 onwards, in order."""
    alphabet, shifted = [], 0
    for byte in range(256):
        if 33 <= byte <= 126 or 161 <= byte <= 172 or 174 <= byte <= 255:
            alphabet.append(chr(byte))
        else:
            alphabet.append(chr(256 + shifted))
            shifted += 1
    return alphabet


BYTE_OF_CHAR = {char: byte for byte, char in enumerate(byte_level_alphabet())}
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Vocabulary:
    """Token texts and kinds by id. An id that a file leaves out has the text ``None`` and no bytes.

    ``tokens`` holds bytes where a file's token is not valid UTF-8.
    """

    __slots__ = ("tokens", "kinds", "spelling", "_bytes")

    def __init__(self, tokens: Sequence[str | bytes | None], kinds: Sequence[int], spelling: Spelling) -> None:
        self.tokens = list(tokens)
        self.kinds = bytearray(kinds)
        self.spelling = spelling
        self._bytes: list[bytes | None] = [None] * len(self.tokens)

    def __len__(self) -> int:
        return len(self.tokens)

    def pad_to(self, num_tokens: int) -> None:
        """Add ids without text up to ``num_tokens``: rows a model's embedding has beyond its tokenizer."""
        missing = num_tokens - len(self.tokens)
        if missing > 0:
            self.tokens += [None] * missing
            self.kinds += bytes([TokenKind.UNUSED]) * missing
            self._bytes += [None] * missing

    def check(self, token_id: int) -> int:
        """``token_id``, or TokenizerError when it is not an id of this vocabulary."""
        try:
            index = token_id if type(token_id) is int else -1 if type(token_id) is bool else operator.index(token_id)
        except TypeError:
            index = -1
        if not 0 <= index < len(self.tokens):
            raise TokenizerError(f"token id {token_id!r} is not in the vocabulary; ids are integers from 0 to {len(self.tokens) - 1}")
        return index

    def is_special(self, token_id: int) -> bool:
        return self.kinds[self.check(token_id)] in _SPECIAL

    def is_unused(self, token_id: int) -> bool:
        return self.kinds[self.check(token_id)] == TokenKind.UNUSED

    def bytes_of(self, token_id: int, skip_special: bool = False) -> bytes:
        """The bytes token ``token_id`` stands for; part of a character when the token is. TokenizerError if there is no such id.

        ``skip_special``: none for a special token.
        """
        token_id = self.check(token_id)
        if skip_special and self.kinds[token_id] in _SPECIAL:
            return b""
        known = self._bytes[token_id]
        if known is None:
            known = self._bytes[token_id] = self._spell(self.tokens[token_id], self.kinds[token_id])
        return known

    def text_of(self, token_id: int) -> str:
        """The token's own text as the file spells it, for names such as bos_token; "" for an id without text."""
        token = self.tokens[self.check(token_id)]
        return token.decode("utf-8", "replace") if isinstance(token, bytes) else token or ""

    def _spell(self, token: str | bytes | None, kind: int) -> bytes:
        if token is None:
            return b""
        if isinstance(token, bytes):
            return token
        if kind in (TokenKind.CONTROL, TokenKind.UNKNOWN, TokenKind.USER_DEFINED):
            return token.encode("utf-8")
        if self.spelling is Spelling.BYTE_LEVEL:
            try:
                return bytes([BYTE_OF_CHAR[char] for char in token])
            except KeyError:  # an added token that its file calls ordinary: it is written as it reads
                return token.encode("utf-8")
        if kind == TokenKind.BYTE and (match := _BYTE_TOKEN.fullmatch(token)):
            return bytes([int(match[1], 16)])
        return token.replace(BLANK, " ").encode("utf-8")

    def byte_tokens_complete(self) -> bool:
        """Whether every byte has a byte token, so that any text can be encoded."""
        tokens = [self.tokens[i] for i, kind in enumerate(self.kinds) if kind == TokenKind.BYTE]
        found = {token.upper() for token in tokens if isinstance(token, str)}
        return len(found) == 256

    def unspellable(self) -> re.Pattern[str] | None:
        """A pattern of characters that byte-level merging cannot spell because the token of an ASCII or lead byte is missing."""
        if self.spelling is not Spelling.BYTE_LEVEL:
            return None
        known = set(self.tokens)
        missing = [byte for char, byte in BYTE_OF_CHAR.items() if char not in known]
        ranges = [(byte, byte) for byte in missing if byte < 0x80]
        ranges += [((b & 0x1F) << 6, (b & 0x1F) << 6 | 0x3F) for b in missing if 0xC2 <= b < 0xE0]
        ranges += [(max((b & 0x0F) << 12, 0x800), (b & 0x0F) << 12 | 0xFFF) for b in missing if 0xE0 <= b < 0xF0]
        ranges += [(max((b & 0x07) << 18, 0x10000), min((b & 0x07) << 18 | 0x3FFFF, 0x10FFFF)) for b in missing if 0xF0 <= b < 0xF5]
        if not ranges:
            return None
        return re.compile("[" + "".join(f"\\U{low:08x}-\\U{high:08x}" for low, high in ranges) + "]")


@dataclass(slots=True)
class TokenizerParts:
    """What a builder hands to ``Tokenizer``: the encoder of the `tokenizers` library, the vocabulary and the model's settings.

    ``prefix_ids`` and ``suffix_ids`` are what the model's own setting puts around a plain prompt (BOS, rarely EOS).
    ``strip_first_blank``: the encoder puts a blank before the first word, so decoding takes one off the start of the text.
    """

    encoder: tokenizers.Tokenizer
    vocabulary: Vocabulary
    bos_token_id: int | None = None
    eos_token_id: int | None = None
    eos_token_ids: frozenset[int] = field(default_factory=frozenset)
    prefix_ids: tuple[int, ...] = ()
    suffix_ids: tuple[int, ...] = ()
    strip_first_blank: bool = False
    chat_template_source: str | None = None
