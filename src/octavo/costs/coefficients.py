"""A step cost that no longer learns: numbers from a real engine's steps, kept in a file, that price the steps of a simulation and are what
an engine starts from on the machine that they were fitted on.

    {"format": "octavo-step-cost", "version": 2,
     "seconds_per": {"row": ..., "pair": ..., "position": ..., "sequence": ..., "logit_row": ..., "step": ...},
     "pieces": {"row": [[up to, seconds each], ..., [null, seconds each]], "logit_row": [...]},
     "host_s": ..., "host_s_per_sequence": ..., "wake_s": ..., "median_error": ..., "max_rows": ..., "num_steps": ...,
     "errors": {kind: {"num_steps": ..., "median": ..., "p90": ..., "bias": ...}}, "fitted_for": {...}, "about": "where it comes from"}

Version 1 had no pieces, and of the host one number. Owns the form of the file; who looks for one, and for what it holds, is
``engine.step_costs``.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo.core.cost import StepShape
from octavo.core.step import StepPlan
from octavo.core.words import as_written
from octavo.costs.terms import CostTerms

if TYPE_CHECKING:
    from octavo.costs.fitted import FittedCost

FORMAT, VERSION = "octavo-step-cost", 2
_NAMES = ("row", "pair", "position", "sequence", "logit_row", "step")  # as FittedCost has them
_MAX_PIECES = 64
_MOST = 1e12  # of any number in a file: products of three of them are numbers yet


class CostFileError(ValueError):
    """A file of coefficients is wrong; the message names file, field and limit."""


@dataclass(frozen=True, slots=True)
class Ramp:
    """Seconds of a number of rows in straight pieces from 0 on, for what no single price per row fits: reading weights costs the same for
    one row as for a few, and kernels go in tiles. ``pieces``: (up to how many rows, seconds of each row of the piece), the last one without
    end (inf). No piece: 0 s for any number."""

    pieces: tuple[tuple[float, float], ...] = ()
    _ends: tuple[float, ...] = field(init=False, repr=False, compare=False)
    _begins: tuple[tuple[float, float], ...] = field(init=False, repr=False, compare=False)  # rows and seconds where each piece begins

    def __post_init__(self) -> None:
        begins, rows, seconds = list[tuple[float, float]](), 0.0, 0.0
        for up_to, each in self.pieces:
            if not up_to > rows or not 0.0 <= each < math.inf:
                raise ValueError(f"pieces: {self.pieces!r} is not allowed; ends rise, and no price is below 0")
            begins.append((rows, seconds))
            rows, seconds = up_to, seconds + each * (up_to - rows if up_to < math.inf else 0.0)
        if self.pieces and rows != math.inf:
            raise ValueError(f"pieces: {self.pieces!r} is not allowed; the last one has no end")
        object.__setattr__(self, "_ends", tuple(up_to for up_to, _ in self.pieces))
        object.__setattr__(self, "_begins", tuple(begins))

    def __call__(self, num_rows: float) -> float:
        if not self.pieces:
            return 0.0
        i = bisect_left(self._ends, num_rows)
        rows, seconds = self._begins[i]
        return seconds + self.pieces[i][1] * (num_rows - rows)

    def times(self, factor: float) -> Ramp:
        """Every piece at ``factor`` times its price."""
        return Ramp(tuple((up_to, factor * each) for up_to, each in self.pieces))


@dataclass(frozen=True, slots=True)
class KindErrors:
    """How far off predictions were on steps that were not fitted on. ``median``, ``p90``: of |predicted / taken - 1|; ``bias``: all that
    was predicted over all that was taken, less 1."""

    num_steps: int
    median: float
    p90: float
    bias: float


@dataclass(frozen=True, slots=True)
class FittedFor:
    """What coefficients hold for: a model in the form in which a backend computes it (``fingerprint``: weights, types, kernels), on a
    number of threads of a machine. ``model`` and ``date`` are for people."""

    machine: str
    isa: str
    threads: int
    fingerprint: str
    model: str = ""
    date: str = ""

    def same_as(self, other: FittedFor) -> bool:
        """Whether steps take the same there."""
        return (self.machine, self.isa, self.threads, self.fingerprint) == (other.machine, other.isa, other.threads, other.fingerprint)


@dataclass(frozen=True, slots=True)
class Coefficients:
    """A CostModel. ``seconds_per``: of a row, a (row, position) pair, a position read, a sequence, a logit row, a step, on the device; to
    these come ``rows`` and ``logit_rows``. ``host_s``, ``host_s_per_sequence``: per step beside the device. ``wake_s``: what a step that
    follows on idleness takes more, the way of its request to it included. ``median_error``: of the fit, on steps that were told before they
    were learned from (None: not known). ``max_rows``, ``num_steps``: of the steps it was fitted on.
    """

    seconds_per: tuple[float, float, float, float, float, float]
    host_s: float = 0.0
    median_error: float | None = None
    max_rows: int = 0
    about: str = ""
    rows: Ramp = Ramp()
    logit_rows: Ramp = Ramp()
    host_s_per_sequence: float = 0.0
    wake_s: float = 0.0
    num_steps: int = 0
    errors: Mapping[str, KindErrors] = field(default_factory=dict)
    fitted_for: FittedFor | None = None

    @classmethod
    def of(cls, fitted: FittedCost, about: str = "") -> Coefficients:
        """What ``fitted`` knows now."""
        base = fitted.base
        if base is not None:
            corrected = base.corrected(fitted.factors)
            return replace(corrected, median_error=fitted.median_error, max_rows=fitted.max_rows, about=about or base.about)
        a, b, c, d, e, f = fitted.factors
        per = (a, b, c, d, e, f)
        return cls(per, 0.0, fitted.median_error, fitted.max_rows, about, num_steps=fitted.num_observations)

    def corrected(self, factors: list[float]) -> Coefficients:
        """With its ``parts_of`` at so many times their prices. The host's stay."""
        fixed, rows, attention = factors
        a, b, c, d, e, f = self.seconds_per
        return replace(
            self,
            seconds_per=(rows * a, attention * b, attention * c, rows * d, rows * e, fixed * f),
            rows=self.rows.times(rows),
            logit_rows=self.logit_rows.times(rows),
        )

    def times(self, factor: float) -> Coefficients:
        """All of it, the host's share too, at ``factor`` times its price."""
        host_s, per_sequence, wake_s = factor * self.host_s, factor * self.host_s_per_sequence, factor * self.wake_s
        return replace(self.corrected([factor] * 3), host_s=host_s, host_s_per_sequence=per_sequence, wake_s=wake_s)

    def seconds(self, plan: StepPlan) -> float:
        """See CostModel."""
        return self.seconds_of(StepShape.of(plan))

    def seconds_of(self, shape: StepShape) -> float:
        """As ``seconds`` of any plan of this shape."""
        fixed, rows, attention = self.parts_of(shape)
        return fixed + rows + attention + self.host_s + self.host_s_per_sequence * shape.num_sequences

    def parts_of(self, shape: StepShape) -> tuple[float, float, float]:
        """Seconds on the device: of the step by itself, of its rows, of their attention."""
        a, b, c, d, e, f = self.seconds_per
        rows = a * shape.num_rows + d * shape.num_sequences + e * shape.num_logit_rows
        rows += self.rows(shape.num_rows) + self.logit_rows(shape.num_logit_rows)
        return f, rows, b * shape.num_pairs + c * shape.num_context

    def mean_prices(self) -> list[float]:
        """As ``seconds_per``, pieces at their mean price in the largest step that was fitted on (of logit rows the first ones' price)."""
        a, b, c, d, e, f = self.seconds_per
        most = max(1, self.max_rows)
        return [a + self.rows(most) / most, b, c, d, e + self.logit_rows(1), f]

    def terms(self, plan: StepPlan) -> CostTerms:
        """The seconds of ``plan`` by what bounds them: what a step costs by itself is the reading of weights."""
        shape = StepShape.of(plan)
        _, b, c, d, _, f = self.seconds_per
        _, rows, _ = self.parts_of(shape)
        sequences_s = d * shape.num_sequences
        return CostTerms(
            weights=f,
            arithmetic=rows - sequences_s,
            kv=c * shape.num_context,
            attention=b * shape.num_pairs,
            host=self.host_s + self.host_s_per_sequence * shape.num_sequences + sequences_s,
        )

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it; ``coefficients_of`` reads it again."""
        data: dict[str, Any] = {"format": FORMAT, "version": VERSION, "seconds_per": dict(zip(_NAMES, self.seconds_per, strict=True))}
        data["pieces"] = {"row": _listed(self.rows), "logit_row": _listed(self.logit_rows)}
        data |= {name: getattr(self, name) for name in _NUMBERS}
        data |= {"median_error": self.median_error, "errors": {kind: asdict(one) for kind, one in self.errors.items()}}
        return data | {"fitted_for": None if self.fitted_for is None else asdict(self.fitted_for), "about": self.about}

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=1)


_NUMBERS = ("host_s", "host_s_per_sequence", "wake_s", "max_rows", "num_steps")


def _listed(ramp: Ramp) -> list[list[float | None]]:
    return [[None if up_to == math.inf else up_to, each] for up_to, each in ramp.pieces]


def read_coefficients(path: str | Path) -> Coefficients:
    """The coefficients in a file. Raises CostFileError, OSError."""
    raw = Path(path).read_bytes()
    if not raw.strip():
        raise CostFileError(f"{path}: the file is empty")
    try:
        data = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise CostFileError(f"{path}: it is no JSON: {error}") from None
    try:
        return coefficients_of(data)
    except CostFileError as error:
        raise CostFileError(f"{path}: {error}") from None


def coefficients_of(data: object) -> Coefficients:
    """From what ``to_dict`` gives, possibly by way of JSON. Raises CostFileError without the name of a file."""
    if not isinstance(data, dict) or data.get("format") != FORMAT or data.get("version") not in (1, VERSION):
        raise CostFileError(f'"format": "{FORMAT}" and "version": 1 or {VERSION} are needed')
    per = data.get("seconds_per")
    if not isinstance(per, Mapping) or set(per) != set(_NAMES):
        raise CostFileError(f"seconds_per: an object with exactly {', '.join(_NAMES)} is needed")
    a, b, c, d, e, f = (_number(name, per[name]) for name in _NAMES)
    numbers = {name: _number(name, data.get(name, 0.0)) for name in _NUMBERS}
    pieces = data.get("pieces") or {}
    found = Coefficients(
        (a, b, c, d, e, f),
        host_s=numbers["host_s"],
        median_error=None if data.get("median_error") is None else _number("median_error", data["median_error"]),
        max_rows=int(numbers["max_rows"]),
        about=str(data.get("about", "")),
        rows=_ramp("row", pieces),
        logit_rows=_ramp("logit_row", pieces),
        host_s_per_sequence=numbers["host_s_per_sequence"],
        wake_s=numbers["wake_s"],
        num_steps=int(numbers["num_steps"]),
        errors=_errors(data.get("errors")),
        fitted_for=_fitted_for(data.get("fitted_for")),
    )
    if not found.seconds_of(StepShape(1, 1, 1, 1, 1)) > 0.0:
        raise CostFileError("seconds_per: a step of one row costs nothing")
    return found


def _number(name: str, value: object, least: float = 0.0) -> float:
    if isinstance(value, (int, float)) and not isinstance(value, bool) and least <= value <= _MOST:
        return float(value)
    raise CostFileError(f"{name}: {as_written(value)} is not allowed; a number from {least:g} to {_MOST:g}")


def _ramp(name: str, pieces: object) -> Ramp:
    field_name = f"pieces {name}"
    listed = pieces.get(name, []) if isinstance(pieces, Mapping) else None
    if not isinstance(listed, list) or len(listed) > _MAX_PIECES or any(not isinstance(one, list) or len(one) != 2 for one in listed):
        raise CostFileError(f"{field_name}: a list of at most {_MAX_PIECES} pairs [up to, seconds each] is needed")
    checked = [(math.inf if up_to is None else _number(field_name, up_to), _number(field_name, each)) for up_to, each in listed]
    try:
        return Ramp(tuple(checked))
    except ValueError as error:
        raise CostFileError(f"{field_name}: {str(error).removeprefix('pieces: ')}") from None


def _errors(data: object) -> dict[str, KindErrors]:
    if not isinstance(data or {}, Mapping):
        raise CostFileError(f"errors: {as_written(data)} is not allowed; an object by kind of step")
    found = dict[str, KindErrors]()
    for kind, one in (data or {}).items():  # type: ignore[attr-defined]
        if not isinstance(one, Mapping) or set(one) != {"num_steps", "median", "p90", "bias"}:
            raise CostFileError(f"errors {kind}: an object with exactly num_steps, median, p90, bias is needed")
        numbers = [_number(f"errors {kind} {name}", one[name]) for name in ("num_steps", "median", "p90")]
        found[str(kind)] = KindErrors(int(numbers[0]), numbers[1], numbers[2], _number(f"errors {kind} bias", one["bias"], -1.0))
    return found


def _fitted_for(data: object) -> FittedFor | None:
    if data is None:
        return None
    texts = ("machine", "isa", "fingerprint", "model", "date")
    if not isinstance(data, Mapping) or any(not isinstance(data.get(name), str) for name in texts) or type(data.get("threads")) is not int:
        raise CostFileError(f"fitted_for: an object with the texts {', '.join(texts)} and the integer threads is needed")
    return FittedFor(data["machine"], data["isa"], data["threads"], data["fingerprint"], data["model"], data["date"])
