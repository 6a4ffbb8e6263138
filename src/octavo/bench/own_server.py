"""An `octavo serve` of the load generator's own: a child process that is there as long as it is needed."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import tempfile
from types import FrameType, TracebackType
from typing import NoReturn

from octavo.engine.interrupts import interrupts_deferred

STOP_S = 30.0  # for a server that has nothing left to do

_READY = re.compile(r"is ready at (\S+)")


class OwnServer:
    """``with OwnServer(flags) as url``: serves until the block ends, however it ends; SIGTERM ends the block as Ctrl-C does.

    Raises RuntimeError with the server's own words when it does not start.
    """

    def __init__(self, flags: list[str]) -> None:
        self._argv = [sys.executable, "-m", "octavo.cli.main", "serve", "--host", "127.0.0.1", "--port", "0", *flags]
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 -- closed by __exit__
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> str:
        self._old_handler = signal.signal(signal.SIGTERM, _terminated)
        try:
            # A signal that came while the child is made, and is not yet known here, would leave it behind.
            with interrupts_deferred(), interrupts_deferred(signal.SIGTERM):
                self._process = self._start()
            assert self._process.stdout is not None
            ready = _READY.search(self._process.stdout.readline())
            if ready is None:
                self._process.wait(STOP_S)
                raise RuntimeError(f"the server did not start: {self._last_words()}")
            return ready[1]
        except BaseException:
            self.__exit__(None, None, None)
            raise

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        process = self._process
        if process is not None:
            stop_process(process)
        self._errors.close()
        signal.signal(signal.SIGTERM, self._old_handler)

    @property
    def pid(self) -> int:
        """Of the process that serves."""
        assert self._process is not None, "it has not been started"
        return self._process.pid

    def _start(self) -> subprocess.Popen[str]:
        """In a session of its own: a Ctrl-C is for the generator, which then stops the server."""
        return subprocess.Popen(
            self._argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=self._errors, text=True, start_new_session=True
        )

    def _last_words(self) -> str:
        self._errors.seek(0)
        lines = self._errors.read().decode("utf-8", "replace").strip().splitlines()
        return lines[-1].removeprefix("octavo: ") if lines else "it said nothing"


def stop_process(process: subprocess.Popen[str]) -> None:
    """End a server that has nothing left to do, within ``STOP_S`` seconds or by force, and close what was read of it."""
    process.terminate()
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    if process.stdout is not None:
        process.stdout.close()


def _terminated(number: int, frame: FrameType | None) -> NoReturn:
    raise SystemExit(128 + number)
