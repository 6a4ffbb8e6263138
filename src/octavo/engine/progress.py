"""A progress bar of one line on stderr: prompts done, tokens a second. Nothing else writes to a terminal from the engine."""

from __future__ import annotations

import sys
import time

WIDTH = 30
INTERVAL_S = 0.1


class ProgressBar:
    def __init__(self, num_prompts: int) -> None:
        self._num_prompts = num_prompts
        self._num_tokens = 0
        self._started_s = time.monotonic()
        self._shown_s = 0.0

    def update(self, num_done: int, num_new_tokens: int) -> None:
        """Show at most every INTERVAL_S, and always the end."""
        self._num_tokens += num_new_tokens
        now_s = time.monotonic()
        done = num_done == self._num_prompts
        if now_s - self._shown_s < INTERVAL_S and not done:
            return
        self._shown_s = now_s
        rate = self._num_tokens / max(now_s - self._started_s, 1e-9)
        filled = WIDTH * num_done // self._num_prompts
        bar = "#" * filled + "." * (WIDTH - filled)
        text = f"\r[{bar}] {num_done}/{self._num_prompts} prompts, {self._num_tokens} tokens, {rate:.0f} token/s "
        print(text, end="\n" if done else "", file=sys.stderr, flush=True)
