"""Which kernels compute: the level that was asked for, without the entries that are wrong on this machine.

An entry is wrong when the doctor found it so (``verdicts``) or when the short check of this process does. It is then taken from the
next lower level where it is right. Owns that choice and its name; never measures, never writes.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Mapping
from functools import cache

from octavo.backends.base import BackendError
from octavo.backends.cpu.verdicts import WrongKernels, read_verdicts

logger = logging.getLogger("octavo.backends")

# (kernel, format, shape, right, error, tolerance) of one class of cases
CheckRow = tuple[str, str, str, bool, float, float]


def isa_level() -> str:
    """The kernel level: $OCTAVO_ISA when set (avx512 is the better of its two), else the best this machine has.

    Raises BackendError for one it lacks.
    """
    from octavo.backends.cpu import _native

    wanted = os.environ.get("OCTAVO_ISA")
    levels = _native.isa_levels()
    if not wanted:
        return levels[-1]
    try:
        return _native.isa_level(wanted)
    except ValueError:
        raise BackendError(f"OCTAVO_ISA: {wanted!r} is not available here; this machine has {', '.join(levels)}") from None


def kernel_path() -> str:
    """The kernels a backend uses, as the native module takes them: a level, or a level with entries of lower ones, each with a warning.

    "avx512", "avx512-matmul:avx2". Raises BackendError for a level the machine lacks, and when an entry is right on no level.
    """
    level, wrong_at = isa_level(), cache(known_wrong)
    chosen = replacements(level, wrong_at)
    for entry, lower in chosen.items():
        why = wrong_at(level)[entry]
        logger.warning("kernel %s of %s is wrong on this machine (%s); that of %s is used", entry, level, why, lower)
    return path_name(level, chosen)


def known_wrong(level: str) -> WrongKernels:
    """Wrong entries of a level: what the doctor found, and what a short check finds now."""
    return read_verdicts().get(level, {}) | short_check(level)


def replacements(level: str, wrong_at: Callable[[str], Mapping[str, str]]) -> dict[str, str]:
    """Wrong entries of ``level`` -> the next lower level where each is right. Raises BackendError when there is none."""
    from octavo.backends.cpu import _native

    levels = _native.isa_levels()
    lower = levels[: levels.index(level)][::-1]
    chosen = {}
    for entry, why in wrong_at(level).items():
        right = next((candidate for candidate in lower if entry not in wrong_at(candidate)), None)
        if right is None:
            raise BackendError(f"kernel {entry} of {level} is wrong on this machine ({why}), and no lower level has one that is right")
        chosen[entry] = right
    return chosen


def path_name(level: str, chosen: Mapping[str, str]) -> str:
    return level + "".join(f"-{entry}:{lower}" for entry, lower in sorted(chosen.items()))


def wrong_kernels(rows: Iterable[CheckRow]) -> WrongKernels:
    """Entry -> its first wrong class of cases, in words."""
    wrong: WrongKernels = {}
    for kernel, kind, shape, right, error, tolerance in rows:
        if not right:
            wrong.setdefault(kernel, f"{f'{kind}, ' if kind else ''}{shape}: error {error:.2g}, tolerance {tolerance:.2g}")
    return wrong


@cache
def short_check(level: str) -> WrongKernels:
    """Every entry and format on a few small cases: 1.5 ms, once per process."""
    from octavo.backends.cpu import _native

    return wrong_kernels(_native.check_kernels(level, False))
