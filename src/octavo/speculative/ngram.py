"""Prompt lookup: the last n tokens of a text, where they stood before, and what followed there (Saxena, "Prompt Lookup Decoding", 2023).

One index per n from ``min_n`` to ``max_n`` over prompt and own output, each n-gram -> the end of its most recent occurrence. A token takes
one insertion and one look-up per n. Memory: at most one dict entry per token and n; measured on prose, 70 bytes for each.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Seq

from octavo.core.request import Request
from octavo.speculative.proposer import NO_TOKEN

_TOKEN_BITS = 32  # an n-gram's key is its tokens side by side in one integer, the last one lowest
_MAX_COUNTED = 32  # tokens of a match that are counted as evidence


class _Text:
    """One sequence: its tokens, the index, and the match of its end."""

    __slots__ = ("ends", "match_end", "match_length", "tokens")

    def __init__(self, num_sizes: int) -> None:
        self.tokens = array("i")
        self.ends: list[dict[int, int]] = [{} for _ in range(num_sizes)]  # [n - min_n] key -> tokens up to the end of the n-gram
        self.match_end = 0  # 0: no match
        self.match_length = 0

    def extend(self, token_ids: Seq[int], min_n: int) -> None:
        """Append tokens. An n-gram enters the index when the token after it is known, so that the text's end never finds itself."""
        tokens, ends = self.tokens, self.ends
        for token in token_ids:
            length = len(tokens)
            key = 0
            for n in range(1, min(min_n + len(ends) - 1, length) + 1):
                key |= tokens[length - n] << _TOKEN_BITS * (n - 1)
                if n >= min_n:
                    ends[n - min_n][key] = length
            tokens.append(token)
        self._match(min_n)

    def _match(self, min_n: int) -> None:
        tokens, ends, length = self.tokens, self.ends, len(self.tokens)
        found = key = 0
        for n in range(1, min(min_n + len(ends) - 1, length) + 1):
            key |= tokens[length - n] << _TOKEN_BITS * (n - 1)
            if n >= min_n:
                end = ends[n - min_n].get(key, 0)
                if end == 0:
                    break  # what does not occur is no part of a longer n-gram that does
                found = end
        self.match_end = found
        self.match_length = _common_suffix(tokens, found, length) if found else 0

    def continuation(self, num_tokens: int) -> list[int]:
        """What followed the match, at most ``num_tokens``; where that runs into the end of the text, its period goes on."""
        start, known = self.match_end, len(self.tokens)
        tokens = self.tokens[start : start + num_tokens].tolist()
        while len(tokens) < num_tokens:
            tokens.append(tokens[start - known])
        return tokens


def _common_suffix(tokens: array[int], a: int, b: int) -> int:
    """Tokens that the first ``a`` and the first ``b`` have in common at their ends, up to _MAX_COUNTED."""
    count = 0
    while count < _MAX_COUNTED and count < a and tokens[a - 1 - count] == tokens[b - 1 - count]:
        count += 1
    return count


class NgramProposer:
    """A Proposer by prompt lookup; the evidence is how many tokens before the end match, beyond max_n too.

    Raises ValueError unless 1 <= min_n <= max_n.
    """

    name = "ngram"
    looks_up = True

    def __init__(self, min_n: int = 2, max_n: int = 4) -> None:
        if not 1 <= min_n <= max_n:
            raise ValueError(f"min_n, max_n: {min_n}, {max_n} are not allowed; 1 <= min_n <= max_n")
        self._min_n = min_n
        self._num_sizes = max_n - min_n + 1
        self._texts: dict[int, _Text] = {}

    def begin(self, seq_id: int, token_ids: Seq[int], request: Request | None = None, choice: int = 0) -> None:
        self._texts[seq_id] = _Text(self._num_sizes)
        self.extend(seq_id, token_ids)

    def extend(self, seq_id: int, token_ids: Seq[int]) -> None:
        self._texts[seq_id].extend(token_ids, self._min_n)

    def peek(self, seq_id: int) -> tuple[int, int]:
        text = self._texts[seq_id]
        return (text.match_length, text.tokens[text.match_end]) if text.match_end else (0, NO_TOKEN)

    def propose(self, requests: Seq[tuple[int, int]]) -> list[list[int]]:
        out = []
        for seq_id, max_drafts in requests:
            text = self._texts[seq_id]
            out.append(text.continuation(max_drafts) if text.match_end else [])
        return out

    def end(self, seq_id: int) -> None:
        self._texts.pop(seq_id, None)
