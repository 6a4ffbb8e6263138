"""Text to token ids and back, for one model.

Owns the rules that every path shares: what is put before a prompt, what the text of a token is, how a text begins and ends.
How files describe a tokenizer is the business of ``tokenizer_gguf`` and ``tokenizer_hf``; merging is done by the `tokenizers` library.

- **BOS** is added only by ``encode(..., add_special_tokens=True)``, only where the model's own setting says so, and never a
  second time: a prompt whose text begins with BOS keeps that one. A rendered chat is encoded with add_special_tokens=False,
  so it has exactly the BOS that its template writes.
- **Special tokens in text** are read as those tokens, in prompts as in rendered chats.
- **The very first blank**: where the model puts a blank before the first word (SentencePiece's prefix), one blank at the start of
  the whole text, prompt included, is taken off when decoding. All other blanks are kept.
- **An incomplete character** at the end of a text is one U+FFFD, streamed or not.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from octavo.models.decode_stream import DecodeStream
from octavo.models.vocabulary import TokenizerError, TokenizerParts

__all__ = ["Tokenizer", "TokenizerError", "DecodeStream"]

log = logging.getLogger(__name__)
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # the engine owns the cores; no second thread pool


class Tokenizer:
    """Encodes and decodes for one model. Thread-safe: nothing changes after construction but caches of equal values.

    ``vocab_size`` counts ids, with or without text. ``eos_token_ids`` end a generation: the file's own and the known texts that
    end a chat turn. ``bos_token`` and ``eos_token`` are their texts, "" where there is none.
    """

    def __init__(self, parts: TokenizerParts) -> None:
        self._encoder = parts.encoder
        self._encoder.no_truncation()  # a file may ask for either; a prompt is never cut or padded silently
        self._encoder.no_padding()
        self._vocabulary = parts.vocabulary
        self._prefix_ids = list(parts.prefix_ids)
        self._suffix_ids = list(parts.suffix_ids)
        self._strip_first_blank = parts.strip_first_blank
        self._unspellable = parts.vocabulary.unspellable()
        self.bos_token_id = parts.bos_token_id
        self.eos_token_id = parts.eos_token_id
        self.eos_token_ids = parts.eos_token_ids
        self.add_bos = parts.bos_token_id is not None and parts.bos_token_id in parts.prefix_ids
        self.add_eos = bool(parts.suffix_ids)
        self.chat_template_source = parts.chat_template_source
        self.bos_token = "" if parts.bos_token_id is None else parts.vocabulary.text_of(parts.bos_token_id)
        self.eos_token = "" if parts.eos_token_id is None else parts.vocabulary.text_of(parts.eos_token_id)

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any]) -> Tokenizer:
        """From the metadata of a GGUF file (``tokenizer.*`` keys, Python values). TokenizerError names the key at fault."""
        from octavo.models import tokenizer_gguf

        return cls(tokenizer_gguf.build(metadata))

    @classmethod
    def from_folder(cls, path: str | os.PathLike[str]) -> Tokenizer:
        """From a folder with tokenizer.json and its settings files. TokenizerError names the file at fault."""
        from octavo.models import tokenizer_hf

        return cls(tokenizer_hf.build(path))

    @property
    def vocab_size(self) -> int:
        return len(self._vocabulary)

    def pad_to(self, num_tokens: int) -> None:
        """Accept ids up to ``num_tokens`` - 1, without text: rows that a model's output has beyond its tokenizer. Call it before use."""
        self._vocabulary.pad_to(num_tokens)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The token ids of ``text``; with ``add_special_tokens`` what the model's own setting puts around a prompt (see the module).

        TokenizerError for text that is not valid Unicode (lone surrogates). Characters for which a byte-level vocabulary has no
        token are left out, as the reference tokenizers do, with a warning in the log.
        """
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            found = f"U+{ord(text[error.start]):04X} at character {error.start}"
            raise TokenizerError(f"text: lone surrogate {found}; text must be valid Unicode") from None
        if self._unspellable is not None and (lost := self._unspellable.search(text)):
            log.warning("text has U+%04X, which this vocabulary has no token for; it is left out", ord(lost[0]))
        # As a batch of one, since only batches let go of the interpreter lock: a long text must not stop everybody else.
        ids: list[int] = self._encoder.encode_batch_fast([text], add_special_tokens=False)[0].ids
        if not add_special_tokens:
            return ids
        prefix = self._prefix_ids
        if self.add_bos and ids[:1] == [self.bos_token_id]:
            prefix = [token_id for token_id in prefix if token_id != self.bos_token_id]
        return prefix + ids + self._suffix_ids

    @cached_property
    def longest_token_bytes(self) -> int:
        """Bytes of the longest token: a text of more than n times as many takes more than n tokens."""
        return max(len(self._vocabulary.bytes_of(token_id)) for token_id in range(self.vocab_size))

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of a whole sequence: what ``stream`` gives for the same ids, pushed and flushed."""
        vocabulary = self._vocabulary
        shown = (i for i in token_ids if not (skip_special_tokens and vocabulary.is_special(i)))
        data = b"".join(map(vocabulary.bytes_of, shown))
        if self._strip_first_blank:
            data = data.removeprefix(b" ")
        return data.decode("utf-8", "replace")

    def stream(self, prompt_token_ids: Sequence[int] = (), skip_special_tokens: bool = True) -> DecodeStream:
        """An incremental decoder for what follows ``prompt_token_ids`` (none: the text starts here)."""
        return DecodeStream(self._vocabulary, prompt_token_ids, skip_special_tokens, self._strip_first_blank)

    def token_text(self, token_id: int) -> str:
        """The token decoded alone, as log-probabilities show it; has U+FFFD where the token is part of a character."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes the token stands for; those of consecutive tokens join to the text's UTF-8."""
        return self._vocabulary.bytes_of(token_id)

    def is_unused(self, token_id: int) -> bool:
        """Whether the id is kept free: a row without text, or one that its file calls unused, such as padding."""
        return self._vocabulary.is_unused(token_id)

    def is_special(self, token_id: int) -> bool:
        """Whether ``skip_special_tokens`` hides the token."""
        return self._vocabulary.is_special(token_id)
