"""Machines that are not at hand, priced from a table of what others measured on them: prompt and token times by batch, read from a file.

The file is that of splitwise-sim (Patel et al., "Splitwise", ISCA 2024; ``perf_model.csv``): one row per measurement, in milliseconds, of a
model on a machine at (prompt size, batch size, output tokens). It is read by path and never part of the package. Owns the reading, the
interpolation and three ways to look a step up (``LOOKUPS``); knows nothing of schedulers.

A step of prompts alone costs ``prompt_s`` of all its rows together. What decoding costs is where the ways differ:

- **published**: what the public simulator does. It looks the *number of sequences* up on an axis of *context tokens*, so a decode step
  costs the same at any batch (47.5 ms on the A100 table, from 1 to 64 sequences). A mixed step costs 1.1 times the prompt time of its rows.
- **context**: the tokens of context that are read, on the same axis. Mixed steps as published.
- **two-variable**: linear pieces in the number of sequences over the rows at 512 tokens each, plus a slope for each token of context above
  or below 512 (least squares over the rows with one sequence). The table has two variables and its one axis merges them: long contexts are
  not charged as if they were more sequences. A mixed step costs 1.1 times the prompt time plus what decoding adds to that of one sequence.

None of them can price a chunk that attends to earlier chunks of its prompt by more than its rows: no such row was measured.
"""

from __future__ import annotations

import csv
import statistics
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from octavo.core.step import StepPlan

LOOKUPS = ("published", "context", "two-variable")
_MIXED = 1.1  # of a step that holds prompts and decoding sequences, over prompts alone
_ROW_TOKENS = 512  # prompt of the rows that were measured at several batch sizes
_ROW_OUTPUT = 128  # and their output


class TableError(ValueError):
    """A table cannot be read, or lacks what was asked for; the message names file, line and column."""


class Curve:
    """Straight lines between points, and on beyond the outermost two as their line goes. ``points``: (x, y), at least two."""

    def __init__(self, points: Iterable[tuple[float, float]]) -> None:
        ordered = sorted(points)
        if len({x for x, _ in ordered}) != len(ordered) or len(ordered) < 2:
            raise ValueError(f"points: {ordered!r} is not allowed; at least two, each x once")
        self._x = [x for x, _ in ordered]
        self._y = [y for _, y in ordered]
        self._slopes = [(y1 - y0) / (x1 - x0) for (x0, y0), (x1, y1) in zip(ordered, ordered[1:], strict=False)]

    @property
    def points(self) -> list[tuple[float, float]]:
        return list(zip(self._x, self._y, strict=True))

    def __call__(self, x: float) -> float:
        i = min(max(bisect_left(self._x, x), 1), len(self._slopes)) - 1
        return self._slopes[i] * (x - self._x[i]) + self._y[i]


class TableRow(NamedTuple):
    """One measurement. ``prompt_s`` of all prompts of the batch together, ``token_s`` of one decode step."""

    num_prompt: int  # tokens of each sequence
    batch_size: int
    num_output: int
    prompt_s: float
    token_s: float


@dataclass(frozen=True, slots=True)
class MachineTable:
    """One model on one kind of machine. Times in seconds.

    ``prompt_s``, ``token_s``: by prompt size x batch size, the median of all rows with that product. ``batch_s``: of a decode step, by the
    number of sequences, at 512 tokens each. ``context_slope_s``: what each token of context more than these 512 adds.
    """

    name: str
    prompt_s: Curve
    token_s: Curve
    batch_s: Curve
    context_slope_s: float

    @classmethod
    def of(cls, name: str, rows: Iterable[TableRow]) -> MachineTable:
        """Raises TableError when the rows are too few to interpolate."""
        rows = list(rows)
        single = [(row.num_prompt, row.token_s) for row in rows if row.batch_size == 1 and row.num_output == _ROW_OUTPUT]
        batches = [(row.batch_size, row.token_s) for row in rows if row.num_prompt == _ROW_TOKENS and row.num_output == _ROW_OUTPUT]
        try:
            return cls(
                name,
                Curve(_medians((row.num_prompt * row.batch_size, row.prompt_s) for row in rows)),
                Curve(_medians((row.num_prompt * row.batch_size, row.token_s) for row in rows)),
                Curve(_medians(batches)),
                _slope(_medians(single)),
            )
        except (ValueError, statistics.StatisticsError):
            needed = f"several prompt sizes at batch size 1 and several batch sizes at {_ROW_TOKENS} tokens, with {_ROW_OUTPUT} of output"
            raise TableError(f"{name}: {len(rows)} rows are too few; needed are {needed}") from None

    def decode_s(self, num_sequences: int, num_context: int) -> float:
        """Seconds of a step that decodes ``num_sequences`` with ``num_context`` tokens of context together, in two variables."""
        return self.batch_s(num_sequences) + self.context_slope_s * (num_context - _ROW_TOKENS * num_sequences)


class TableCost:
    """A CostModel that looks steps up in ``table``, in the way that ``lookup`` names."""

    def __init__(self, table: MachineTable, lookup: str = "published") -> None:
        if lookup not in LOOKUPS:
            raise ValueError(f"lookup: {lookup!r} is not allowed; one of {', '.join(LOOKUPS)}")
        self.table = table
        self.lookup = lookup
        self._one_s = table.decode_s(1, _ROW_TOKENS)

    def seconds(self, plan: StepPlan) -> float:
        """A slice decodes when it has one row and something before it; all others are prompts, or chunks of one."""
        num_prompt = num_decoding = num_context = 0
        for piece in plan.slices:
            if piece.start and len(piece.token_ids) == 1:
                num_decoding += 1
                num_context += piece.start + 1
            else:
                num_prompt += len(piece.token_ids)
        return self.step_s(num_prompt, num_decoding, num_context)

    def step_s(self, num_prompt: int, num_decoding: int, num_context: int) -> float:
        """Seconds of a step of ``num_prompt`` rows of prompts beside ``num_decoding`` sequences that hold ``num_context`` tokens, prompt
        and output, together."""
        table = self.table
        if not num_prompt:
            if not num_decoding:
                return 0.0
            if self.lookup == "two-variable":
                return table.decode_s(num_decoding, num_context)
            return table.token_s(num_decoding if self.lookup == "published" else num_context)
        if not num_decoding:
            return table.prompt_s(num_prompt)
        seconds = _MIXED * table.prompt_s(num_prompt + num_decoding)
        return seconds + table.decode_s(num_decoding, num_context) - self._one_s if self.lookup == "two-variable" else seconds


def _medians(pairs: Iterable[tuple[int, float]]) -> list[tuple[float, float]]:
    groups: dict[int, list[float]] = defaultdict(list)
    for x, y in pairs:
        groups[x].append(y)
    return [(x, statistics.median(ys)) for x, ys in groups.items()]


def _slope(points: list[tuple[float, float]]) -> float:
    return statistics.linear_regression([x for x, _ in points], [y for _, y in points]).slope


_COLUMNS = ("model", "hardware", "tensor_parallel", "prompt_size", "batch_size", "token_size", "prompt_time", "token_time")


def read_machine_tables(path: str | Path, model: str, tensor_parallel: int) -> Mapping[str, MachineTable]:
    """The tables of ``model``, by hardware. Raises TableError, OSError."""
    rows: dict[str, list[TableRow]] = defaultdict(list)
    seen: set[str] = set()
    with open(path, newline="", encoding="utf-8-sig") as file:
        reader = csv.DictReader(file)
        try:
            missing = [column for column in _COLUMNS if column not in (reader.fieldnames or ())]
            if missing:
                raise TableError(f"{path}: line 1: the columns {', '.join(missing)} are missing")
            for cells in reader:
                seen.add(f"{cells['model']} on {cells['tensor_parallel']}")
                if (cells["model"], cells["tensor_parallel"]) == (model, str(tensor_parallel)):
                    rows[cells["hardware"]].append(_row(f"{path}: line {reader.line_num}", cells))
        except UnicodeDecodeError as error:
            raise TableError(f"{path}: it is not text (byte {error.start} is no UTF-8)") from None
        except csv.Error as error:
            raise TableError(f"{path}: line {reader.line_num}: {error}") from None
    if not rows:
        raise TableError(f"{path}: no rows of {model} on {tensor_parallel} devices; there are {', '.join(sorted(seen)) or 'none'}")
    return {hardware: MachineTable.of(f"{model} on {hardware}", found) for hardware, found in rows.items()}


def _row(where: str, cells: Mapping[str, str]) -> TableRow:
    numbers: list[float] = []
    for column in _COLUMNS[3:]:
        try:
            number = float(cells[column])
        except (TypeError, ValueError):
            number = float("nan")
        if not 0 < number < 1e9:
            raise TableError(f"{where}: column {column}: {cells[column]!r} is not allowed; a number above 0")
        numbers.append(number)
    num_prompt, batch_size, num_output = map(int, numbers[:3])
    return TableRow(num_prompt, batch_size, num_output, numbers[3] / 1000, numbers[4] / 1000)
