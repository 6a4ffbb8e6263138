"""Ctrl-C waits for the end of a step.

A step that is left in the middle leaves a plan in flight and blocks half written. Owns nothing else; knows no engine.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType


@contextlib.contextmanager
def interrupts_deferred() -> Iterator[None]:
    """Within it a SIGINT is only noted; at the end it is raised again, to whoever handled it before.

    Python runs signal handlers on the main thread alone, so on any other this does nothing.
    """
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or handler is None:  # None: set by C code, cannot be put back
        yield
        return
    noted = False

    def note(_number: int, _frame: FrameType | None) -> None:
        nonlocal noted
        noted = True

    signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if noted:
            signal.raise_signal(signal.SIGINT)
