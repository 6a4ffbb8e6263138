"""Keeps workers running as processes of this host: starts them, watches them, and puts others in their place.

    start ──▶ running ──ended by itself──▶ (pause) ──▶ running ...
                 ├── replaced: another at once
                 └── released: no other, unless it is kept again

Owns the processes. What they work at comes by their channels, and so does the word that it is enough; the secret reaches them by their
environment. Pauses double with each worker that ends before it was ready; after ``MAX_FAILED`` of them in a row ``trouble`` has why, while
it is tried on. A worker that says that it can never work (exit status ``HOPELESS``) is not tried again until it is replaced. Children
have sessions of their own, so that a Ctrl-C at the terminal is the front end's alone to obey; when that is killed they notice at their
channel and end, whoever listens at its address then.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from octavo.backends.machine import available_cpus
from octavo.distributed.channel import Address
from octavo.distributed.handshake import SECRET_VARIABLE
from octavo.distributed.launcher import FIRST_PAUSE_S, LONGEST_PAUSE_S, MAX_FAILED, KeptWorker, KeptWorkers

logger = logging.getLogger("octavo.cluster")

HOPELESS = 3  # exit status of a worker that another try would not help
END_S = 30.0  # that a worker gets to end by itself, and to write its cache to disk if it is to
GIVE_UP_S = 5.0  # that a child looks for its front end


@dataclass(eq=False)
class _Child(KeptWorker):
    process: asyncio.subprocess.Process | None = None
    ending: asyncio.Lock = field(default_factory=asyncio.Lock)  # of whoever waits for the end of a process: once is enough to say so
    is_awaited: bool = False  # whoever has begun waits for it to be ready, and says why it is not
    wanted: asyncio.Event = field(default_factory=asyncio.Event)  # another is to be started at once
    pause_s: float = FIRST_PAUSE_S

    def begin_anew(self) -> None:
        super().begin_anew()
        self.pause_s = FIRST_PAUSE_S


class LocalProcesses(KeptWorkers[_Child]):
    """A ``GrowingLauncher``. ``roles`` by name; ``threads`` of each; ``command``: what a worker's arguments are put behind; ``placed``: the
    command that runs another where a worker, named first, is to be; the process that results is the worker itself."""

    def __init__(
        self,
        roles: Mapping[str, str],
        secret: str,
        threads: int | None = None,
        command: Sequence[str] = (sys.executable, "-m", "octavo.cli.main", "worker"),
        placed: Callable[[str, list[str]], list[str]] = lambda name, argv: argv,
    ) -> None:
        super().__init__({name: _Child(name, role) for name, role in roles.items()})
        self._secret, self._threads, self._command, self._placed = secret, threads, list(command), placed
        self._address: Address | None = None
        self._stopping = False

    @property
    def pids(self) -> dict[str, int]:
        """Of the processes that run, by name."""
        running = ((child.name, child.process) for child in self._workers.values())
        return {name: process.pid for name, process in running if process is not None and process.returncode is None}

    async def start(self, address: Address) -> None:
        self._address = address
        for child in self._workers.values():
            child.is_awaited = True
            self._begin(child)

    def add(self, role: str) -> str:
        """Start one more worker; returns its name, which no other has had."""
        name = self._new_names.next(role)
        child = self._workers[name] = _Child(name, role)
        self._begin(child)
        return name

    def ready(self, name: str) -> None:
        if (child := self._workers.get(name)) is not None:
            child.pause_s, child.is_awaited = FIRST_PAUSE_S, False
            child.was_ready, child.num_failed, child.trouble, child.is_hopeless = True, 0, None, False

    def told_to_end(self, name: str, pid: int) -> None:
        """See Launcher."""
        if pid == self.pids.get(name):
            super().told_to_end(name, pid)

    async def replace(self, name: str) -> None:
        """Wait for the end of a worker that was told to end, or end it, and have another started; at once, if it had ended by itself.
        One that could not run is tried again: what kept it may have been mended."""
        child = self._workers[name]
        child.wanted.set()
        await self._see_to_end(child)
        if not child.released:
            child.trouble, child.num_failed = None, 0
            self._begin_anew(child)

    async def stop(self) -> None:
        self._stopping = True
        for name, pid in self.pids.items():
            if not self._workers[name].was_ready:  # who has not connected yet is told by nobody else, and would look for its front end
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGTERM)
            # others have been told: a signal, which may be their second, would end them amid the writing of their cache
        await asyncio.gather(*(self._see_to_end(child) for child in self._workers.values()))
        await self._cancel_ends()
        for child in self._workers.values():
            if child.keeper is not None:
                child.keeper.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await child.keeper

    async def _see_to_end(self, child: _Child) -> None:
        """See KeptWorkers."""
        process = child.process
        async with child.ending:
            if process is None or process.returncode is not None:
                return
            try:
                await asyncio.wait_for(asyncio.shield(asyncio.ensure_future(process.wait())), END_S)
            except TimeoutError:
                logger.warning("worker %s (pid %d) does not end and is killed", child.name, process.pid)
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                await process.wait()

    async def _keep(self, child: _Child) -> None:
        """One process after another."""
        while not (child.released or self._stopping):
            child.wanted.clear()
            child.was_ready = False
            try:
                child.process = await self._spawn(child)
            except OSError as error:  # no memory or no process left for it now
                how = f"could not be started: {error}"
            else:
                status = await child.process.wait()
                if status == HOPELESS and not (self._stopping or child.wanted.is_set()):  # also of one that was released meanwhile
                    child.trouble, child.is_hopeless = f"worker {child.name} cannot run; its message is above", True
                    logger.log(logging.INFO if child.is_awaited else logging.ERROR, "%s", child.trouble)
                    return
                how = f"was killed by signal {-status}" if status < 0 else f"has ended with status {status}"
            if child.released or self._stopping:
                return
            if child.wanted.is_set():
                continue
            self._failed(child, how)
            logger.warning("worker %s %s; another is started in %.1f s", child.name, how, child.pause_s)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(child.wanted.wait(), child.pause_s)
            child.pause_s = min(2 * child.pause_s, LONGEST_PAUSE_S)

    def _failed(self, child: _Child, how: str) -> None:
        """Its process has ended, or there was none, and nobody had wanted it."""
        child.num_failed = 0 if child.was_ready else child.num_failed + 1
        if child.num_failed >= MAX_FAILED:
            child.trouble = f"worker {child.name} was never ready in {child.num_failed} starts in a row; the last one {how}"
        if child.num_failed == MAX_FAILED:
            logger.error("%s", child.trouble)

    async def _spawn(self, child: _Child) -> asyncio.subprocess.Process:
        args = ["--connect", str(self._address), "--name", child.name, "--role", child.role, "--give-up-s", f"{GIVE_UP_S:g}"]
        args += ["--parent", str(os.getpid())]
        if self._threads is not None:
            args += ["--threads", str(self._threads)]
        environment = {**os.environ, SECRET_VARIABLE: self._secret}
        process = await asyncio.create_subprocess_exec(
            *self._placed(child.name, [*self._command, *args]), stdin=asyncio.subprocess.DEVNULL, env=environment, start_new_session=True
        )
        logger.info("worker %s is started as process %d", child.name, process.pid)
        return process


def share_of_cores(num_workers: int) -> int:
    """Threads of each of so many workers on this host: an equal share of the cores that this process may use, at least one."""
    return max(1, available_cpus() // num_workers)
