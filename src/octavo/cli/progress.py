"""Progress on stderr: of a download, silent when stderr is no terminal (one line at the end then), and of a measurement."""

from __future__ import annotations

import contextlib
import math
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from octavo.config import EngineConfig

_WIDTH = 30


class DownloadBar:
    """Callable as ``catalog.Progress``."""

    def __init__(self) -> None:
        self._shown = -1.0

    def __call__(self, what: str, done: int, total: int) -> None:
        finished = done >= total
        now = time.monotonic()
        if not finished and (not sys.stderr.isatty() or now - self._shown < 0.1):
            return
        self._shown = now
        share = done / total if total else 1.0
        bar = ("#" * int(share * _WIDTH)).ljust(_WIDTH, ".")
        line = f"{what} [{bar}] {100 * share:3.0f} % of {total / 1e6:.0f} MB"
        if sys.stderr.isatty():
            sys.stderr.write("\r" + line + ("\n" if finished else ""))
        else:
            sys.stderr.write(line + "\n")
        sys.stderr.flush()


def fetch(spec: str) -> str:
    """The local path of a model, fetched with a progress bar when it is not there. Raises PullError."""
    from octavo.models.catalog import CATALOG, cached_path, ensure_model

    if spec in CATALOG and cached_path(CATALOG[spec]) is None:
        print(f"fetching {spec} ({CATALOG[spec].size_bytes / 1e6:.0f} MB)", file=sys.stderr, flush=True)
    return str(ensure_model(spec, DownloadBar()))


def fetched(config: EngineConfig) -> EngineConfig:
    """``config`` with its model as a local path. Called once everything else has been checked, so that no bad flag costs a download."""
    return replace(config, model=replace(config.model, model=fetch(config.model.model)))


@contextlib.contextmanager
def progress_line(what: str) -> Iterator[Callable[[str], None]]:
    """What shows a text: on one line that is written over on a terminal, as a line now and then elsewhere."""
    shown_s, terminal = -math.inf, sys.stderr.isatty()

    def show(text: str) -> None:
        nonlocal shown_s
        now_s = time.monotonic()
        if now_s - shown_s < (0.2 if terminal else 10.0):
            return
        shown_s = now_s
        sys.stderr.write(f"\r{what}: {text}\x1b[K" if terminal else f"{what}: {text}\n")
        sys.stderr.flush()

    try:
        yield show
    finally:
        if terminal and shown_s > -math.inf:  # the next line is its own
            sys.stderr.write("\n")
            sys.stderr.flush()


@contextlib.contextmanager
def passing_line() -> Iterator[Callable[[str], None] | None]:
    """What shows a text on one line, which is written over each time and gone in the end; None where stderr is no terminal."""
    if not sys.stderr.isatty():
        yield None
        return

    def show(text: str) -> None:
        sys.stderr.write(f"\r{text}\x1b[K")
        sys.stderr.flush()

    try:
        yield show
    finally:
        show("")
