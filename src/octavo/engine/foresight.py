"""How much of what answers say could have been foretold: a guess at what speculation would gain where nobody drafts.

Of every few ended answers it is counted how many tokens are those that followed the last time the same two tokens stood in the text, as the
n-gram proposer would have drafted them. Keeps the counts alone, no text.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

_EVERY = 4  # answers of which one is looked at
_MAX_TOKENS = 2048  # from the end of its text: half a millisecond
_ENOUGH = 200  # tokens
_MEMORY = 0.98  # weight of what was counted, once another answer is


def num_foreseen(token_ids: Seq[int], num_known: int) -> int:
    """Tokens from the place ``num_known`` on that follow the last earlier place of the two tokens before them."""
    followers, found = dict[tuple[int, int], int](), 0
    for i in range(2, len(token_ids)):
        pair, token = (token_ids[i - 2], token_ids[i - 1]), token_ids[i]
        if i >= num_known and followers.get(pair) == token:
            found += 1
        followers[pair] = token
    return found


class Foresight:
    def __init__(self) -> None:
        self._num_ended = 0
        self._num_tokens = self._num_foreseen = 0.0

    @property
    def share(self) -> float | None:
        """Of the tokens of the last answers; None while too few were seen."""
        return self._num_foreseen / self._num_tokens if self._num_tokens >= _ENOUGH else None

    def see(self, token_ids: Seq[int], num_prompt: int) -> None:
        """An answer has ended; ``token_ids`` are prompt and answer."""
        self._num_ended += 1
        if self._num_ended % _EVERY != 1:
            return
        begin = max(0, len(token_ids) - _MAX_TOKENS)
        num_known = max(num_prompt, begin + 2) - begin
        self._num_tokens = _MEMORY * self._num_tokens + max(0, len(token_ids) - begin - num_known)
        self._num_foreseen = _MEMORY * self._num_foreseen + num_foreseen(token_ids[begin:], num_known)
