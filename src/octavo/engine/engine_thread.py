"""The thread that runs an engine's steps beside an asyncio program.

Owns the thread, what the event loop asks of the engine between two steps, and the news whether steps make progress. One
``call_soon_threadsafe`` per step carries all of its events across. An idle thread waits on a condition and takes no CPU. Whose the events
are is the business of who is given them: ``async_engine``'s streams, or a worker's channel.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TypeVar

from octavo.engine.engine import Engine
from octavo.engine.outputs import OutputEvent

logger = logging.getLogger("octavo.engine")

SWITCH_INTERVAL_S = 0.0005  # so that a busy event loop hands the interpreter to the loop thread soon

Given = TypeVar("Given")
Action = Callable[[], list[OutputEvent]]
"""What is done to the engine on its thread, between two steps; returns the events that come of it."""


class EngineThread:
    """``deliver`` gets the events of a step on the event loop's thread; without events it tells that the thread has died.
    ``after_step`` is called on the engine's thread after each step, before its events are delivered.

    Life: ``start`` on the event loop, ``post`` on any thread, ``stop`` once.
    """

    def __init__(
        self,
        engine: Engine,
        deliver: Callable[[list[OutputEvent]], None],
        after_step: Callable[[list[OutputEvent]], None] | None = None,
    ) -> None:
        self.engine = engine
        self.died: str | None = None  # of what
        self._deliver = deliver
        self._after_step = after_step
        self._inbox: deque[Action] = deque()
        self._wake = threading.Condition()
        self._stopping = False
        self._is_at_work = False  # at what was posted, at a step, or at what follows on one
        self._beat_s = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="octavo-loop", daemon=True)
        self._aio: asyncio.AbstractEventLoop | None = None
        self._old_switch_interval_s = sys.getswitchinterval()

    @property
    def was_started(self) -> bool:
        return self._aio is not None

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    @property
    def silent_s(self) -> float:
        """Seconds since it last made progress, while there is something to do; else 0."""
        return time.monotonic() - self._beat_s if self._is_at_work or self._has_steps or self._inbox else 0.0

    @property
    def _has_steps(self) -> bool:
        """Whether a step may do something. Where all work waits for what is offered or reserved, only what is posted can change that."""
        return self.engine.has_work and not self.engine.is_stuck

    def start(self) -> None:
        self._aio = asyncio.get_running_loop()
        self._old_switch_interval_s = sys.getswitchinterval()
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        self._thread.start()

    def post(self, action: Action) -> None:
        """Have ``action`` done before the next step."""
        with self._wake:
            if not self._inbox and not self._has_steps and not self._is_at_work:
                self._beat_s = time.monotonic()  # an idle loop was silent by right: progress is due from now on
            self._inbox.append(action)
            self._wake.notify()

    async def stop(self) -> None:
        """Do what was posted, with a step after it, and join the thread. The engine stays open."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        await asyncio.to_thread(self._thread.join)
        await asyncio.sleep(0)  # events posted by the thread's last round are delivered
        sys.setswitchinterval(self._old_switch_interval_s)

    # --- the thread ---------------------------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._wait_for_work():
                self._beat_s, self._is_at_work = time.monotonic(), True
                events: list[OutputEvent] = []
                while self._inbox:
                    events += self._inbox.popleft()()
                events += self.engine.step()
                if self._after_step is not None:
                    self._after_step(events)
                if events:
                    self.tell(self._deliver, events)
                self._is_at_work = False
        except BaseException as error:
            logger.critical("the engine loop has died", exc_info=error)
            self.died = f"{type(error).__name__}: {error}"
            self.tell(self._deliver, [])

    def _wait_for_work(self) -> bool:
        """Wait until there is something to do; False when the thread is to end. Meanwhile small pieces of what can wait are done."""
        while not self._is_wanted():
            idle_s = self.engine.idle()
            with self._wake:
                if not self._is_wanted():
                    self._wake.wait(idle_s)
        return bool(self._inbox) or not self._stopping

    def _is_wanted(self) -> bool:
        return bool(self._inbox) or self._stopping or self._has_steps

    def tell(self, function: Callable[[Given], None], given: Given) -> None:
        """Have ``function`` called on the event loop's thread, in the order of the calls."""
        assert self._aio is not None
        try:
            self._aio.call_soon_threadsafe(function, given)
        except RuntimeError:  # the event loop has been closed: nobody reads any more
            self._stopping = True
