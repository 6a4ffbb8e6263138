"""Text of one sequence: incremental detokenisation and stop strings.

Owns what has been shown of each (request, choice) and what is still held back. It only ever sees new output tokens, so that
preemption and recompute cannot repeat or lose text. It never decides on token ids: EOS, stop token ids and lengths are the scheduler's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class DecodeStream(Protocol):
    """Turns token ids into text piece by piece; a piece is empty while a character is incomplete."""

    def push(self, token_id: int) -> str: ...

    def flush(self) -> str: ...

    def fork(self) -> DecodeStream: ...


class StopMatcher:
    """Finds stop strings in text that arrives in pieces, and holds back text that might begin one.

    Of several matches the one that ends first wins (of those, the one that begins first), so the outcome does not depend on how
    the text is cut into pieces. Held text is at most one character shorter than the longest stop string.
    """

    __slots__ = ("stops", "_first_chars", "_longest", "_held")

    def __init__(self, stops: Sequence[str]) -> None:
        self.stops = tuple(stops)
        self._first_chars = frozenset(s[0] for s in self.stops)
        self._longest = max(map(len, self.stops), default=0)
        self._held = ""

    def push(self, text: str, may_stop: bool = True) -> tuple[str, str | None]:
        """Take ``text``; return (text to show, the stop string found or None). What follows a found stop is dropped.

        A match that ends inside ``text`` while ``may_stop`` is False is passed over for good. The shown text ends before the stop string.
        """
        num_held = len(self._held)
        buffer = self._held + text
        if may_stop:
            found = self._find(buffer, num_held)
            if found is not None:
                end, stop = found
                self._held = ""
                return buffer[: end - len(stop)], stop
        keep = self._num_to_hold(buffer)
        self._held = buffer[len(buffer) - keep :]
        return buffer[: len(buffer) - keep], None

    def flush(self) -> str:
        """The held text: no stop string can come any more."""
        held, self._held = self._held, ""
        return held

    def _find(self, buffer: str, num_old: int) -> tuple[int, str] | None:
        """The (end, stop string) of the match in ``buffer`` that ends first, of those that end after ``num_old`` characters."""
        best: tuple[int, int, str] | None = None
        for stop in self.stops:
            start = buffer.find(stop, max(0, num_old - len(stop) + 1))
            if start >= 0 and (best is None or (start + len(stop), start) < best[:2]):
                best = (start + len(stop), start, stop)
        return None if best is None else (best[0], best[2])

    def _num_to_hold(self, buffer: str) -> int:
        """Length of the longest end of ``buffer`` that is the beginning of a stop string, and not a whole one."""
        size = len(buffer)
        for start in range(max(0, size - self._longest + 1), size):
            if buffer[start] in self._first_chars:
                tail = buffer[start:]
                if any(len(stop) > len(tail) and stop.startswith(tail) for stop in self.stops):
                    return size - start
        return 0


class TextOutput:
    """Shown text of one sequence. One per (request, choice); ``fork`` before the first token makes the next choice's."""

    __slots__ = ("_decoder", "_matcher", "_min_tokens", "_include_stop", "num_tokens")

    def __init__(self, decoder: DecodeStream | None, stops: Sequence[str] = (), min_tokens: int = 0, include_stop: bool = False) -> None:
        self._decoder = decoder
        self._matcher = StopMatcher(stops) if stops and decoder is not None else None
        self._min_tokens = min_tokens
        self._include_stop = include_stop
        self.num_tokens = 0  # output tokens seen

    def fork(self) -> TextOutput:
        """A second output in the same state; only before any token was pushed."""
        assert self.num_tokens == 0
        stops = self._matcher.stops if self._matcher is not None else ()
        decoder = self._decoder.fork() if self._decoder is not None else None
        return TextOutput(decoder, stops, self._min_tokens, self._include_stop)

    def push(self, token_id: int) -> tuple[str, str | None]:
        """Take one output token; return (new text to show, the stop string that this token completed or None).

        ``min_tokens`` holds for stop strings as it does for EOS: only a token after the first ``min_tokens`` can complete one.
        """
        self.num_tokens += 1
        if self._decoder is None:
            return "", None
        text = self._decoder.push(token_id)
        if self._matcher is None or not text:
            return text, None
        return self._match(text)

    def skip(self) -> None:
        """Count a token that has no text: the one that ended the sequence."""
        self.num_tokens += 1

    def finish(self) -> str:
        """The sequence has ended without a stop string: what is still held, an incomplete character included."""
        if self._decoder is None:
            return ""
        held = self._matcher.flush() if self._matcher is not None else ""
        return held + self._decoder.flush()

    def _match(self, text: str) -> tuple[str, str | None]:
        assert self._matcher is not None
        shown, stop = self._matcher.push(text, may_stop=self.num_tokens > self._min_tokens)
        return (shown + stop if stop is not None and self._include_stop else shown), stop
