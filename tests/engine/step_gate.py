"""Steps of a scripted model in another process, as many as a test allows it: what is under way cannot end before the test says so."""

from __future__ import annotations

import os
import time
from pathlib import Path

from octavo.core.step import StepPlan

VARIABLE = "OCTAVO_TEST_STEPS"  # in a child's environment: the path of its gate
_LOOK_S = 0.002


class StepGate:
    """The test's side. Open until ``allow`` is called; each process that goes through counts for itself."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def allow(self, num_steps: int) -> None:
        """So many steps in all since the gate was open; those beyond wait."""
        written = self.path.with_suffix(".new")
        written.write_text(str(num_steps))
        written.rename(self.path)  # a reader sees one number or the other

    def open(self) -> None:
        self.path.unlink(missing_ok=True)


class GatedSteps:
    """The child's side: a ``before_step`` of a scripted backend."""

    def __init__(self, path: Path) -> None:
        self._path, self._num_steps = path, 0

    @classmethod
    def of_environment(cls) -> GatedSteps | None:
        path = os.environ.get(VARIABLE)
        return None if path is None else cls(Path(path))

    def __call__(self, plan: StepPlan) -> None:
        while (allowed := self._allowed()) is not None and self._num_steps >= allowed:
            time.sleep(_LOOK_S)
        self._num_steps = 0 if allowed is None else self._num_steps + 1

    def _allowed(self) -> int | None:
        try:
            return int(self._path.read_text())
        except FileNotFoundError:
            return None
