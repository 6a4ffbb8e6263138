"""Steps in which nothing is looked for: where drafts do not pay, looking for them must not cost either.

With many sequences a step has little room for drafts and much to look through. After a look that found nothing worth drafting, the next
steps are slept through, as many as keep the time of looking below a share of all. A look that found something, or another set of
sequences, ends it.
"""

from __future__ import annotations

_SHARE = 0.01  # of the time, at most, for looking in vain
_MOST = 32  # steps; text that begins to repeat itself waits no longer


class Nap:
    """Decides from times alone; knows no sequence."""

    def __init__(self) -> None:
        self._left = self._num_running = 0
        self.asleep = False  # in the step being made

    def begin(self, num_running: int, may_sleep: bool = True) -> bool:
        """A step of so many sequences is being planned. True: sleep through it."""
        if num_running != self._num_running or not may_sleep:
            self._num_running, self._left = num_running, 0
        self.asleep = self._left > 0
        self._left -= self.asleep
        return self.asleep

    def looked(self, num_drafts: int, host_s: float, step_s: float) -> None:
        """The step that has ended was looked at for ``host_s`` and took ``step_s``; ``num_drafts`` were in it."""
        self._left = 0 if num_drafts or step_s <= 0.0 else min(_MOST, int(host_s / (_SHARE * step_s)))
