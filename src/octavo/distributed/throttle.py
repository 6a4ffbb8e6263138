"""A token bucket: holds a sender back to so many bytes a second, as a slower link would. For measurements on one machine."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


class Throttle:
    """``bytes_per_s`` shared by all threads that ``take`` of it, ``burst_bytes`` of which may go at once."""

    def __init__(
        self,
        bytes_per_s: float,
        burst_bytes: int = 128 << 10,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        if not bytes_per_s > 0.0:
            raise ValueError(f"bytes_per_s: {bytes_per_s!r} is not allowed; above 0")
        self._bytes_per_s, self._burst_s = bytes_per_s, burst_bytes / bytes_per_s
        self._clock, self._sleep = clock, sleep
        self._free_s = clock()  # when all that has been taken is through
        self._lock = threading.Lock()

    def take(self, num_bytes: int) -> None:
        """Wait until so many bytes may have gone, and those before them."""
        with self._lock:
            now = self._clock()
            self._free_s = max(self._free_s, now - self._burst_s) + num_bytes / self._bytes_per_s
            wait_s = self._free_s - now
        if wait_s > 0.0:
            self._sleep(wait_s)
