"""`octavo serve` and `octavo worker` as processes of a test: started, waited for, hit, and gone at its end whatever happens."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from octavo.bench.netns import Host

START_S = 300.0  # hangs are found, slow machines are forgiven
STOP_S = 60.0
_READY = re.compile(r"is ready at http://\S*:(\d+)")
_OCTAVO = [sys.executable, "-m", "octavo.cli.main"]


class Process:
    """One octavo command. What it prints is in ``log``, lines of standard output and of errors as they come."""

    def __init__(self, arguments: Sequence[str], log: Path, host: Host | None = None, environment: dict[str, str] | None = None) -> None:
        self.arguments = list(arguments)
        self.log = log
        self._host = host
        self._environment = os.environ | {"PYTHONUNBUFFERED": "1"} | (environment or {})
        self._process: subprocess.Popen[bytes] | None = None
        self._log_start = 0

    def __enter__(self) -> Process:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def text(self) -> str:
        """What it has printed since its last start."""
        return self.log.read_bytes()[self._log_start :].decode(errors="replace") if self.log.exists() else ""

    def start(self) -> None:
        """Also after it has ended; its log goes on."""
        argv = _OCTAVO + self.arguments
        argv = argv if self._host is None else self._host.command(argv)
        self._log_start = self.log.stat().st_size if self.log.exists() else 0
        with self.log.open("ab") as file:
            self._process = subprocess.Popen(
                argv, stdin=subprocess.DEVNULL, stdout=file, stderr=file, env=self._environment, start_new_session=True
            )
        if self._host is not None:
            self._host.processes.append(self._process)

    def kill(self) -> None:
        """SIGKILL, which also ends a stopped process."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(STOP_S)

    def signal(self, number: int) -> None:
        """Nothing when it has ended."""
        assert self._process is not None
        if self.is_alive:
            os.kill(self._process.pid, number)

    def stop(self) -> int | None:
        """SIGTERM, and SIGKILL when that is not heeded. Its exit status."""
        if self._process is None:
            return None
        if self.is_alive:
            self._process.terminate()
            self.signal(signal.SIGCONT)
            try:
                self._process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                self.kill()
        return self._process.returncode

    def wait_for(self, condition: Callable[[], Any], timeout_s: float = START_S) -> Any:
        """The first true value of ``condition``. AssertionError with the log when it does not come, or the process ends before."""
        deadline = time.monotonic() + timeout_s
        while not (value := condition()):
            ended = not self.is_alive
            assert not ended or condition(), f"{' '.join(self.arguments)} ended:\n{self.text}"
            assert time.monotonic() < deadline, f"{' '.join(self.arguments)}: waited in vain:\n{self.text}"
            time.sleep(0.02)
        return value


class Server(Process):
    """An `octavo serve` (or another command with its ready line) that is ready inside the block, at ``port`` on this machine's loopback."""

    def __init__(self, arguments: Sequence[str], log: Path, environment: dict[str, str] | None = None) -> None:
        super().__init__(arguments, log, environment=environment)
        self.port = 0

    def __enter__(self) -> Server:
        self.start()
        try:
            self.wait_until_ready()
        except BaseException:
            self.stop()
            raise
        return self

    def wait_until_ready(self) -> None:
        self.port = int(self.wait_for(lambda: _READY.search(self.text))[1])

    def get(self, path: str) -> Any:
        """The JSON of a 200, or its text where it is none. AssertionError for another status."""
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=STOP_S)) as connection:
            connection.request("GET", path)
            answer = connection.getresponse()
            text = answer.read().decode()
        assert answer.status == 200, f"GET {path}: {answer.status} {text}"
        return json.loads(text) if answer.getheader("content-type", "").startswith("application/json") else text

    @property
    def num_handed_over(self) -> float:
        """Requests that a prefill worker has handed to another one; 0 without workers."""
        return self.metrics().get('octavo_cluster_hand_offs_total{role="front_end",worker=""}', 0.0)

    def metrics(self) -> dict[str, float]:
        """Samples by name with labels."""
        lines = (line.rsplit(" ", 1) for line in self.get("/metrics").splitlines() if not line.startswith("#"))
        return {name: float(value) for name, value in lines}


class Later:
    """Actions at times to come, in threads; all of them are done, or given up, when the block ends."""

    def __init__(self) -> None:
        self._timers: list[threading.Timer] = []

    def __enter__(self) -> Later:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for timer in self._timers:
            timer.cancel()
        for timer in self._timers:
            timer.join()

    def at(self, in_s: float, action: Callable[[], None]) -> None:
        timer = threading.Timer(max(0.0, in_s), action)
        self._timers.append(timer)
        timer.start()
