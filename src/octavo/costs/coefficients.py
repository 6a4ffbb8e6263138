"""A fitted cost that no longer learns: six numbers from a real engine's steps, kept in a file, that price the steps of a simulation.

    {"format": "octavo-step-cost", "version": 1, "seconds_per": {"row": ..., "pair": ..., "position": ..., "sequence": ...,
     "logit_row": ..., "step": ...}, "host_s": ..., "median_error": ..., "max_rows": ..., "about": "where it comes from"}
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from octavo.core.cost import StepShape
from octavo.core.step import StepPlan
from octavo.costs.fitted import FittedCost
from octavo.costs.terms import CostTerms

FORMAT, VERSION = "octavo-step-cost", 1
_NAMES = ("row", "pair", "position", "sequence", "logit_row", "step")  # in the order of FittedCost.weights


class CostFileError(ValueError):
    """A file of coefficients is wrong; the message names file, field and limit."""


@dataclass(frozen=True, slots=True)
class Coefficients:
    """A CostModel. ``seconds_per``: of a row, a (row, position) pair, a position read, a sequence, a logit row, a step. ``host_s``: per
    step beside the device. ``median_error``: of the fit, on steps told before they were learned from (None: not known)."""

    seconds_per: tuple[float, float, float, float, float, float]
    host_s: float = 0.0
    median_error: float | None = None
    max_rows: int = 0  # of the steps it was fitted on
    about: str = ""

    @classmethod
    def of(cls, fitted: FittedCost, host_s: float = 0.0, about: str = "") -> Coefficients:
        """What ``fitted`` knows now."""
        a, b, c, d, e, f = fitted.weights
        return cls((a, b, c, d, e, f), host_s, fitted.median_error, fitted.max_rows, about)

    def seconds(self, plan: StepPlan) -> float:
        """See CostModel."""
        return self.seconds_of(StepShape.of(plan))

    def seconds_of(self, shape: StepShape) -> float:
        """As ``seconds`` of any plan of this shape."""
        a, b, c, d, e, f = self.seconds_per
        device_s = a * shape.num_rows + b * shape.num_pairs + c * shape.num_context
        return device_s + d * shape.num_sequences + e * shape.num_logit_rows + f + self.host_s

    def terms(self, plan: StepPlan) -> CostTerms:
        """The seconds of ``plan`` by what bounds them: what a step costs by itself is the reading of weights."""
        shape = StepShape.of(plan)
        a, b, c, d, e, f = self.seconds_per
        return CostTerms(
            weights=f,
            arithmetic=a * shape.num_rows + e * shape.num_logit_rows,
            kv=c * shape.num_context,
            attention=b * shape.num_pairs,
            host=self.host_s + d * shape.num_sequences,
        )

    def to_json(self) -> str:
        per = dict(zip(_NAMES, self.seconds_per, strict=True))
        data = {"format": FORMAT, "version": VERSION, "seconds_per": per, "host_s": self.host_s, "median_error": self.median_error}
        return json.dumps({**data, "max_rows": self.max_rows, "about": self.about}, indent=1)


def read_coefficients(path: str | Path) -> Coefficients:
    """The coefficients in a file. Raises CostFileError, OSError."""
    try:
        data = json.loads(Path(path).read_bytes())
    except ValueError as error:
        raise CostFileError(f"{path}: it is no JSON: {error}") from None
    if not isinstance(data, dict) or data.get("format") != FORMAT or data.get("version") != VERSION:
        raise CostFileError(f'{path}: "format": "{FORMAT}" and "version": {VERSION} are needed')
    per = data.get("seconds_per")
    if not isinstance(per, Mapping) or set(per) != set(_NAMES):
        raise CostFileError(f"{path}: seconds_per: an object with exactly {', '.join(_NAMES)} is needed")
    a, b, c, d, e, f = (_number(path, name, per[name]) for name in _NAMES)
    median_error = None if data.get("median_error") is None else _number(path, "median_error", data["median_error"])
    host_s, max_rows = _number(path, "host_s", data.get("host_s", 0.0)), int(_number(path, "max_rows", data.get("max_rows", 0)))
    return Coefficients((a, b, c, d, e, f), host_s, median_error, max_rows, str(data.get("about", "")))


def _number(path: str | Path, name: str, value: object) -> float:
    if isinstance(value, (int, float)) and not isinstance(value, bool) and 0.0 <= value < math.inf:
        return float(value)
    raise CostFileError(f"{path}: {name}: {value!r} is not allowed; a finite number of at least 0")
