"""Recorded loads: when requests came and how long they and their answers were, from the CSV files that providers publish.

Owns the formats (``FORMATS``, told apart by their header line) and the checks of every cell. The only module of this package that reads
a file. Texts are in none of these traces; ``requests`` makes prompts of the recorded lengths.
"""

from __future__ import annotations

import csv
import math
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from octavo.workload.lengths import MAX_TOKENS

MAX_SECONDS = 1e15
_ORIGIN = datetime(2020, 1, 1, tzinfo=UTC)  # near what is recorded: a float keeps the microseconds


class TraceError(ValueError):
    """A trace file cannot be read; the message names file, line and column."""


class TraceRow(NamedTuple):
    arrival_s: float  # from the first row
    num_prompt: int  # tokens
    num_output: int  # tokens


def _date_s(text: str) -> float:
    moment = datetime.fromisoformat(text)
    return ((moment if moment.tzinfo else moment.replace(tzinfo=UTC)) - _ORIGIN).total_seconds()


def _number_s(text: str) -> float:
    value = float(text)
    if not 0.0 <= value <= MAX_SECONDS:  # nan as well
        raise ValueError(text)
    return value


@dataclass(frozen=True, slots=True)
class TraceFormat:
    """The columns that matter, by name; others are allowed and not read."""

    name: str
    time: str
    prompt: str
    output: str
    seconds: Callable[[str], float]
    time_form: str

    @property
    def columns(self) -> tuple[str, str, str]:
        return self.time, self.prompt, self.output


_SECONDS = f"a number of seconds from 0 to {MAX_SECONDS:g}"
FORMATS = (
    TraceFormat("Azure LLM inference", "TIMESTAMP", "ContextTokens", "GeneratedTokens", _date_s, "a date and time"),
    TraceFormat("BurstGPT", "Timestamp", "Request tokens", "Response tokens", _number_s, _SECONDS),
    TraceFormat("splitwise-sim", "arrival_timestamp", "prompt_size", "token_size", _number_s, _SECONDS),
    TraceFormat("plain", "arrival_s", "num_prompt", "num_output", _number_s, _SECONDS),
)


@dataclass(frozen=True, slots=True)
class Trace:
    """Rows by arrival. ``num_left_out``: rows that are not among them, since they have no prompt or no output, or are too long."""

    rows: tuple[TraceRow, ...]
    num_left_out: int = 0

    def times(self, rng: random.Random) -> Iterator[float]:
        """As ``Arrivals``: when the rows came."""
        return (row.arrival_s for row in self.rows)

    def lengths(self, rng: random.Random) -> Iterator[tuple[int, int]]:
        """As ``LengthPairs``: (prompt, output) of the rows."""
        return ((row.num_prompt, row.num_output) for row in self.rows)

    def window(self, start_s: float = 0.0, duration_s: float = math.inf, num_requests: int | None = None) -> Trace:
        """Rows from ``start_s`` on, for ``duration_s`` and at most ``num_requests``; times count from ``start_s``."""
        if not (math.isfinite(start_s) and start_s >= 0):
            raise ValueError(f"start_s: {start_s!r} is not allowed; a finite number of seconds from 0")
        if not duration_s > 0:
            raise ValueError(f"duration_s: {duration_s!r} is not allowed; above 0")
        end_s = start_s + duration_s
        rows = [row._replace(arrival_s=row.arrival_s - start_s) for row in self.rows if start_s <= row.arrival_s < end_s]
        return Trace(tuple(rows[:num_requests]), self.num_left_out)

    def faster(self, speed: float) -> Trace:
        """The same requests in 1 / ``speed`` of the time."""
        if not (math.isfinite(speed) and speed > 0):
            raise ValueError(f"speed: {speed!r} is not allowed; a finite number above 0")
        return Trace(tuple(row._replace(arrival_s=row.arrival_s / speed) for row in self.rows), self.num_left_out)

    def fitting(self, max_tokens: int) -> Trace:
        """Rows whose prompt and output together are at most ``max_tokens``."""
        rows = tuple(row for row in self.rows if row.num_prompt + row.num_output <= max_tokens)
        return Trace(rows, self.num_left_out + len(self.rows) - len(rows))


@dataclass(frozen=True, slots=True)
class Resampled:
    """As ``LengthPairs``: the pairs of a trace drawn at random with replacement, without end. What prompt and answer have to do with each
    other stays."""

    trace: Trace

    def lengths(self, rng: random.Random) -> Iterator[tuple[int, int]]:
        rows = self.trace.rows
        while True:
            row = rng.choice(rows)
            yield row.num_prompt, row.num_output


def read_trace(path: str | Path, strict: bool = False) -> Trace:
    """The trace in a CSV file of one of ``FORMATS``. Raises TraceError, OSError. Rows without prompt or output are left out and counted;
    ``strict``: those without a prompt are an error, and those without output, of which the prompt is all that is computed, stay."""
    name = str(path)
    with open(path, "rb") as file:
        reader = csv.reader(decoded(name, file), strict=True)
        try:
            header = next(reader, None)
            if header is None:
                raise TraceError(f"{name}: line 1: the file is empty")
            found = _format_of(name, header)
            columns = [(column, header.index(column)) for column in found.columns]
            least, rows = 1 if strict else 0, list[TraceRow]()
            for cells in filter(None, reader):
                where = f"{name}: line {reader.line_num}"
                if len(cells) > len(header):
                    raise TraceError(f"{where}: it has {len(cells)} cells, and the header line {len(header)}")
                rows.append(_row(where, cells, columns, found, least))
                check_order(where, rows[-1].arrival_s, rows[-2].arrival_s if len(rows) > 1 else -math.inf)
        except csv.Error as error:
            raise TraceError(f"{name}: line {reader.line_num}: {error}") from None
    return _trace_of(name, rows, strict)


def _trace_of(name: str, rows: list[TraceRow], strict: bool) -> Trace:
    whole = sorted(row for row in rows if row.num_prompt and (row.num_output or strict))  # those that come at once by their lengths
    if not whole:
        raise TraceError(f"{name}: there is no request in it")
    first_s = whole[0].arrival_s
    return Trace(tuple(row._replace(arrival_s=row.arrival_s - first_s) for row in whole), len(rows) - len(whole))


def check_order(where: str, arrival_s: float, last_s: float) -> None:
    """Raise TraceError for a request that comes before the one on the line above."""
    if arrival_s < last_s:
        raise TraceError(f"{where}: it comes {last_s - arrival_s:g} s before the line above it; requests are needed by arrival")


def decoded(name: str, lines: Iterable[bytes]) -> Iterator[str]:
    """Lines of UTF-8, a byte order mark at the start taken off. Raises TraceError that names file ``name`` and line."""
    for number, line in enumerate(lines, 1):
        try:
            yield line.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as error:
            raise TraceError(f"{name}: line {number}: it is not text (byte {error.start} of the line is no UTF-8)") from None


def _format_of(name: str, header: list[str]) -> TraceFormat:
    for known in FORMATS:
        if set(known.columns) <= set(header):
            twice = [column for column in known.columns if header.count(column) > 1]
            if twice:
                raise TraceError(f"{name}: line 1: column {twice[0]} is there {header.count(twice[0])} times")
            return known
    wanted = "; ".join(f"{known.name}: {', '.join(known.columns)}" for known in FORMATS)
    shown = ", ".join(header)
    raise TraceError(f"{name}: line 1: no known trace has these columns: {shown:.200}; needed are ({wanted})")


def _row(where: str, cells: list[str], columns: list[tuple[str, int]], known: TraceFormat, least_prompt: int) -> TraceRow:
    values: list[float] = []
    for column, index in columns:
        if index >= len(cells):
            raise TraceError(f"{where}: column {column} is missing")
        text = cells[index].strip()
        is_time = column == known.time
        try:
            value = known.seconds(text) if is_time else int(text)
        except (ValueError, OverflowError):
            form = known.time_form if is_time else "a whole number of tokens"
            raise TraceError(f"{where}: column {column}: {text[:80]!r} is not {form}") from None
        least = least_prompt if column == known.prompt else 0
        if not is_time and not least <= value <= MAX_TOKENS:
            raise TraceError(f"{where}: column {column}: {value} is not allowed; from {least} to {MAX_TOKENS} tokens")
        values.append(value)
    time_s, num_prompt, num_output = values
    return TraceRow(time_s, int(num_prompt), int(num_output))
