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
def interrupts_deferred(signum: signal.Signals = signal.SIGINT) -> Iterator[None]:
    """Within it the signal is only noted; at the end it is raised again, to whoever handled it before.

    Python runs signal handlers on the main thread alone, so on any other this does nothing.
    """
    handler = signal.getsignal(signum)
    if threading.current_thread() is not threading.main_thread() or handler is None:  # None: set by C code, cannot be put back
        yield
        return
    noted = False

    def note(_number: int, _frame: FrameType | None) -> None:
        nonlocal noted
        noted = True

    signal.signal(signum, note)
    try:
        yield
    finally:
        signal.signal(signum, handler)
        if noted:
            signal.raise_signal(signum)
