"""Text of a growing sequence, token by token.

Owns the two bits of state that decoding has: bytes of a character still incomplete, and whether any text has come yet.
Never decodes a token twice, so a push costs the same at the start and at the end of a long answer.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from octavo.models.vocabulary import Vocabulary

_MAX_PENDING_BYTES = 3  # of a UTF-8 character that lacks its last byte

_new_decoder = codecs.getincrementaldecoder("utf-8")


class DecodeStream:
    """Joined pushes and the flush are decode(prompt + output) minus decode(prompt), on every path.

    - A character appears with the token that completes it; earlier pushes of its bytes give "".
    - Bytes that cannot be UTF-8 give one U+FFFD for each maximal ill-formed part, as the Unicode standard recommends (and Python does).
    - What is incomplete at the end is one U+FFFD, given by ``flush``.
    - A character begun by the prompt and completed by the output belongs to the output.
    - Where the model puts a blank before the first word, one blank at the very start of the whole text (prompt included) is taken off.
    """

    __slots__ = ("_vocabulary", "_skip_special", "_strip_blank", "_decoder", "_incomplete")

    def __init__(self, vocabulary: Vocabulary, prompt_token_ids: Sequence[int], skip_special_tokens: bool, strip_first_blank: bool) -> None:
        self._vocabulary = vocabulary
        self._skip_special = skip_special_tokens
        self._strip_blank = strip_first_blank and not any(map(self._shown, prompt_token_ids))  # stops at the first shown token
        self._decoder = _new_decoder("replace")
        tail = b""
        for token_id in reversed(prompt_token_ids):
            tail = self._shown(token_id) + tail
            if len(tail) >= _MAX_PENDING_BYTES:
                break
        # The decoder keeps what the prompt began. A tail that starts inside a character only adds U+FFFD to text dropped here.
        self._decode(tail)

    def _shown(self, token_id: int) -> bytes:
        """The bytes a token adds to the text: none for a special token that is skipped."""
        return self._vocabulary.bytes_of(token_id, self._skip_special)

    def _decode(self, piece: bytes) -> str:
        text = self._decoder.decode(piece)
        self._incomplete = bool(self._decoder.getstate()[0])
        return text

    def push(self, token_id: int) -> str:
        """The text that ``token_id`` completes; "" while a character is incomplete. TokenizerError for an id outside the vocabulary."""
        piece = self._vocabulary.bytes_of(token_id, self._skip_special)
        if self._strip_blank and piece:
            self._strip_blank = False
            piece = piece.removeprefix(b" ")
        if piece.isascii() and not self._incomplete:  # the common case, in a third of the time
            return piece.decode("ascii")
        return self._decode(piece)

    def flush(self) -> str:
        """The end of the text: one U+FFFD if a character is incomplete, else "". What was flushed is gone; the stream may go on."""
        self._incomplete = False
        return self._decoder.decode(b"", True)

    def fork(self) -> DecodeStream:
        """A stream of its own that goes on from here, for another continuation of the same tokens."""
        twin = object.__new__(DecodeStream)
        twin._vocabulary, twin._skip_special, twin._strip_blank = self._vocabulary, self._skip_special, self._strip_blank
        twin._decoder = _new_decoder("replace")
        twin._decoder.setstate(self._decoder.getstate())
        twin._incomplete = self._incomplete
        return twin
