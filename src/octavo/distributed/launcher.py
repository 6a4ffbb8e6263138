"""Who has the workers' processes started: what a front end asks of it, and what all that keep processes running have in common."""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar, runtime_checkable

from octavo.distributed.channel import Address
from octavo.distributed.cluster_options import NewNames

FIRST_PAUSE_S = 0.2  # before a worker that has ended is started again; twice as long each time that comes to nothing
LONGEST_PAUSE_S = 30.0
MAX_FAILED = 5  # starts in a row, after which whoever waits for the worker is told
MAX_RELEASED = 256  # workers that have ended for good and can still be started again


class Launcher(Protocol):
    """Who has the workers' processes started, and replaced when they end. All calls on one event loop."""

    @property
    def names(self) -> Sequence[str]:
        """Of the workers that it keeps running."""
        ...

    async def start(self, address: Address) -> None:
        """Begin to start them, to connect to ``address``; waits for none of them."""
        ...

    def ready(self, name: str) -> None:
        """A worker works: should it end, another is started soon. Names that it did not start do nothing."""
        ...

    def release(self, name: str) -> None:
        """A worker that ends from now on is not replaced."""
        ...

    def keep(self, name: str) -> bool:
        """Undo ``release``. True: it had ended, and is started again; False: its process has not ended, and another follows it."""
        ...

    @property
    def released(self) -> Collection[str]:
        """Names of those that were released, of the last ones at least."""
        ...

    def role_of(self, name: str) -> str:
        """Of one that it has started, released ones among them."""
        ...

    def told_to_end(self, name: str, pid: int) -> None:
        """A worker, of this process id by its own word, has been told to end: one that hangs, and so does not, is ended after some time.
        Names that it did not start do nothing, nor does one of elsewhere that has taken such a name."""
        ...

    async def replace(self, name: str) -> None:
        """See to it that the process of a worker, which was told to end, has ended, and start another; also of one that could not run."""
        ...

    async def stop(self) -> None:
        """End all of them, whatever they do. Idempotent."""
        ...

    @property
    def trouble(self) -> str | None:
        """Why a worker can never run, once that is known for certain of any."""
        ...

    @property
    def is_at_end(self) -> bool:
        """None of the workers that it keeps running will ever run, until one is replaced or added; also when it keeps none. Any thread
        may ask."""
        ...

    def trouble_of(self, name: str) -> str | None:
        """Why this one can never run, until it is replaced."""
        ...


@runtime_checkable
class GrowingLauncher(Launcher, Protocol):
    """One that can start more workers."""

    def add(self, role: str) -> str:
        """Start one more; returns its name, which no other has had."""
        ...


@dataclass(eq=False)
class KeptWorker:
    """A worker that is kept running, by its ``keeper``, unless it is ``released``. ``trouble``: why it can never run, as far as is known;
    ``is_hopeless``: it has said so itself, and is not tried again. ``num_failed``: starts in a row that came to nothing."""

    name: str
    role: str
    keeper: asyncio.Task[None] | None = None
    released: bool = False
    trouble: str | None = None
    is_hopeless: bool = False
    num_failed: int = 0
    was_ready: bool = False  # its last process

    def begin_anew(self) -> None:
        """As if nothing had failed before."""
        self.trouble, self.is_hopeless, self.num_failed = None, False, 0


W = TypeVar("W", bound=KeptWorker)


async def cancelled(task: asyncio.Task[None]) -> None:
    """End a task, whatever it does."""
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


class KeptWorkers(Generic[W]):
    """The part of a ``Launcher`` that is the same whatever its processes are. ``workers`` by name."""

    def __init__(self, workers: dict[str, W]) -> None:
        self._workers = workers
        self._released: dict[str, None] = {}  # names, the last one last
        self._new_names = NewNames(workers)
        self._ends = set[asyncio.Task[None]]()  # of processes that were told to

    @property
    def names(self) -> Sequence[str]:
        """See Launcher."""
        return [worker.name for worker in self._kept()]

    @property
    def released(self) -> Collection[str]:
        """See Launcher."""
        return list(self._released)

    @property
    def trouble(self) -> str | None:
        """See Launcher."""
        return next((worker.trouble for worker in self._kept() if worker.trouble is not None), None)

    @property
    def is_at_end(self) -> bool:
        """See Launcher."""
        return all(worker.is_hopeless for worker in self._kept())

    def trouble_of(self, name: str) -> str | None:
        """See Launcher."""
        return self._workers[name].trouble

    def role_of(self, name: str) -> str:
        """See Launcher."""
        return self._workers[name].role

    def release(self, name: str) -> None:
        """See Launcher. Of those that have ended for good the oldest are forgotten: with a load that comes and goes they grow in number."""
        self._workers[name].released = True
        self._released[name] = None
        ended = [one for one in self._released if (keeper := self._workers[one].keeper) is None or keeper.done()]
        for old in ended[:-MAX_RELEASED]:
            del self._workers[old], self._released[old]

    def keep(self, name: str) -> bool:
        """See Launcher. One that could not run is tried again."""
        worker = self._workers[name]
        worker.released = False
        self._released.pop(name, None)
        return self._begin_anew(worker)

    def told_to_end(self, name: str, pid: int) -> None:
        """See Launcher."""
        if (worker := self._workers.get(name)) is not None:
            ends = asyncio.create_task(self._see_to_end(worker))
            self._ends.add(ends)
            ends.add_done_callback(self._ends.discard)

    async def _cancel_ends(self) -> None:
        """All processes have ended."""
        await asyncio.gather(*map(cancelled, list(self._ends)))

    def _kept(self) -> list[W]:
        """At once, since any thread may ask."""
        return [worker for worker in list(self._workers.values()) if not worker.released]

    def _begin(self, worker: W) -> None:
        worker.keeper = asyncio.create_task(self._keep(worker), name=worker.name)

    def _begin_anew(self, worker: W) -> bool:
        """Start its processes again, if nobody does any more."""
        if worker.keeper is not None and not worker.keeper.done():
            return False
        worker.begin_anew()
        self._begin(worker)
        return True

    async def _end_keeper(self, worker: W, timeout_s: float) -> None:
        """Wait for the end of the keeper that there is now, and cancel it when that takes too long; not one that is begun meanwhile."""
        keeper = worker.keeper
        if keeper is not None:
            await asyncio.wait([keeper], timeout=timeout_s)
            await cancelled(keeper)

    @abstractmethod
    async def _see_to_end(self, worker: W) -> None:
        """Wait until the process that it has now has ended; end it when that takes too long."""

    @abstractmethod
    async def _keep(self, worker: W) -> None:
        """Its keeper: one process after another."""
