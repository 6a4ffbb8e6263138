"""What a chat template may cost.

Owns the accounting of one render. Jinja's sandbox keeps a template from reaching Python's internals but bounds neither its
time nor its memory. Here one rule does: **no value a template can hold is larger than the value limit**, counting a list
that is nested in itself many times as often as it would be printed. Whatever makes a value asks first; so printing, comparing
and joining, which happen inside C code that nothing can interrupt, work on bounded values only. Steps and CPU time are bounded too.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Iterator
from string import Formatter
from typing import Any

from octavo.models.chat_messages import TemplateError

VALUE_CHARS = 1 << 20  # size of one value and of the whole output, on top of four times the input's
WORK_CHARS = 64 << 20  # characters written in one render, on top of 64 times the input's
STEPS = 1_000_000  # loop rounds and calls
CPU_S = 2.0  # of the rendering thread, so a busy machine fails nothing
INTEGER_BITS = 4096
_CONTAINER_CHARS = 8  # what a container or an entry counts
_CPU_CHECK_STEPS = 256
_CPU_CHECK_CHARS = 1 << 16

_PERCENT_SPEC = re.compile(r"%(?:\([^)]*\))?[#0\- +]*([\d*]*)(?:\.([\d*]*))?")
_WIDE = re.compile(r"\d{4,}")
_MAX_FORMAT_WIDTH = 999


class LimitExceeded(TemplateError):
    """A template wants more time or memory than a chat can need."""


def size_of(value: Any, limit: int) -> int:
    """Characters ``value`` would take printed, roughly; stops counting above ``limit``. Objects other than data count 1."""
    total, stack = 0, [value]
    while stack and total <= limit:
        item = stack.pop()
        if isinstance(item, str):
            total += len(item) + 1
        elif isinstance(item, dict):
            total += _CONTAINER_CHARS * (len(item) + 1)
            stack.extend(item.keys())
            stack.extend(item.values())
        elif isinstance(item, (list, tuple, set, frozenset)):
            total += _CONTAINER_CHARS * (len(item) + 1)
            stack.extend(item)
        elif isinstance(item, int):
            total += 1 + item.bit_length() // 3
        else:
            total += 1
    return total


class RenderBudget:
    """What is left of the limits of one render, used by one thread."""

    __slots__ = ("value_chars", "_work_chars", "_steps", "_deadline_s", "_unchecked_chars")

    def __init__(self, input_value: Any) -> None:
        input_chars = size_of(input_value, 1 << 62)
        self.value_chars = VALUE_CHARS + 4 * input_chars
        self._work_chars = WORK_CHARS + 64 * input_chars
        self._steps = STEPS
        self._deadline_s = time.thread_time() + CPU_S
        self._unchecked_chars = 0

    def step(self) -> None:
        """One round of a loop or one call."""
        self._steps -= 1
        if self._steps < 0:
            raise LimitExceeded(f"the chat template takes more than {STEPS} steps")
        if not self._steps % _CPU_CHECK_STEPS:
            self._check_time()

    def steps(self, iterable: Iterable[Any]) -> Iterator[Any]:
        for item in iterable:
            self.step()
            yield item

    def reserve(self, num_chars: int) -> None:
        """Ask for a value of ``num_chars`` before it is made."""
        if num_chars > self.value_chars:
            raise LimitExceeded(f"the chat template makes a value of more than {self.value_chars} characters")

    def wrote(self, num_chars: int) -> None:
        """``num_chars`` were written, to a value or to the output."""
        self._work_chars -= num_chars
        if self._work_chars < 0:
            raise LimitExceeded(f"the chat template writes more than {WORK_CHARS} characters")
        self._unchecked_chars += num_chars
        if self._unchecked_chars > _CPU_CHECK_CHARS:
            self._unchecked_chars = 0
            self._check_time()

    def made(self, value: Any) -> Any:
        """``value``, counted; for results whose size could not be told before they were made but is at most a few limits."""
        if isinstance(value, str):
            self.reserve(len(value))
            self.wrote(len(value))
        elif isinstance(value, (list, tuple, dict, set)):
            self.wrote(_CONTAINER_CHARS * (len(value) + 1))
            self.reserve(size_of(value, self.value_chars))
        elif isinstance(value, int):
            check_bits(value.bit_length())
        return value

    def join(self, separator: str, parts: Iterable[Any]) -> str:
        """``separator.join`` of the parts' texts, stopped before it grows over the limit."""
        texts, total = [], 0
        for part in parts:
            text = part if isinstance(part, str) else str(part)
            total += len(text) + len(separator)
            self.reserve(total)
            texts.append(text)
        self.wrote(total)
        return separator.join(texts)

    def _check_time(self) -> None:
        if time.thread_time() > self._deadline_s:
            raise LimitExceeded(f"the chat template takes more than {CPU_S:g} s")


def check_bits(num_bits: int) -> None:
    if num_bits > INTEGER_BITS:
        raise LimitExceeded(f"the chat template makes an integer of more than {INTEGER_BITS} bits")


def check_percent_format(text: str) -> None:
    """Refuse a %-format whose widths are large or come from the arguments."""
    for width, precision in _PERCENT_SPEC.findall(text):
        for number in (width, precision):
            if "*" in number or (number and int(number[:9]) > _MAX_FORMAT_WIDTH):
                raise LimitExceeded(f"the chat template formats with a width of {number}; at most {_MAX_FORMAT_WIDTH}")


def check_brace_format(text: str) -> None:
    """Refuse a str.format text with nested fields (a width that comes from the arguments) or large widths."""
    for _, _, spec, _ in Formatter().parse(text):
        if spec and ("{" in spec or _WIDE.search(spec)):
            raise LimitExceeded(f"the chat template formats with {spec!r}; widths are plain numbers of at most {_MAX_FORMAT_WIDTH}")


def replaced_chars(text: str, old: str, new: str, count: int) -> int:
    """Length of ``text.replace(old, new, count)``; ``count`` -1 is all."""
    found = text.count(old) if old else len(text) + 1
    if count >= 0:
        found = min(found, count)
    return len(text) + found * (len(new) - len(old))
