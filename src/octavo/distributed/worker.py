"""A worker: it dials its front end, loads the model that it is told, and answers attempts until it is told to go.

    connect ─▶ Hello ─▶ Welcome: load ─▶ Ready ─▶ Beat: it has joined, and says so ─▶ serve ─▶ Shutdown: the end
       ▲                                   │                                           │
       └──────── the channel is closed ◀───┴───────────────────────────────────────────┘
                 (all attempts are dropped: their front end has given them to others, or is gone)

Owns the connection, the heartbeat, and the life of the engine; the attempts are ``worker_engine``'s. An engine outlives connections: a
worker that comes back has its model, and what its prefix cache held, at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import logging
import os
import secrets
import socket
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field, replace

from octavo.backends.base import BackendError, OutOfResources
from octavo.config import ConfigError, EngineConfig
from octavo.distributed.answers import answer
from octavo.distributed.channel import Address, Channel, ChannelClosed, connect
from octavo.distributed.fleet import HEARTBEAT_S
from octavo.distributed.kv_ways import LOCAL_HOST
from octavo.distributed.messages import (
    PROTOCOL,
    Abort,
    Answer,
    Ask,
    Beat,
    Begin,
    Cancel,
    FromWorker,
    Goodbye,
    Hello,
    Load,
    MessageError,
    Refuse,
    Release,
    Reserve,
    Reset,
    Resume,
    Send,
    Shutdown,
    Submit,
    ToWorker,
    Welcome,
    config_of,
    to_worker,
)
from octavo.distributed.worker_engine import KVSide, WorkerEngine, ready_of
from octavo.engine.engine import Engine
from octavo.engine.user_files import UserFileError, unused
from octavo.models.catalog import NoSuchModel
from octavo.models.model_file import ModelFileError

logger = logging.getLogger("octavo.worker")

RETRY_S = (0.1, 2.0)  # between attempts to reach the front end: the first wait, and the longest
REFUSED_S = 30.0  # the longest wait of one that is refused: another has its name, say, and may have it for long


MakeKV = Callable[[WorkerEngine, str], KVSide | None]


class WorkerRefused(RuntimeError):
    """The front end does not want this worker; the message says why."""


# What another try of the same would end with as well, as long as nobody mends it.
HOPELESS_ERRORS = (ConfigError, ModelFileError, NoSuchModel, BackendError, UserFileError, WorkerRefused)
SCARCE = (errno.ENOMEM, errno.EAGAIN, errno.EMFILE, errno.ENFILE)


def is_passing(error: Exception) -> bool:
    """One of the ``HOPELESS_ERRORS``, and yet another try may end otherwise: memory, threads or files were short."""
    cause = error.__cause__
    return isinstance(error, OutOfResources) or (isinstance(cause, OSError) and cause.errno in SCARCE)


class FrontEndLost(RuntimeError):
    """There has been no front end for ``give_up_s``, or the one that had started this worker is gone."""


class WorkerFailed(RuntimeError):
    """The engine is of no use any more; the message says why."""


@dataclass(frozen=True, slots=True)
class WorkerOptions:
    """``name``: unique among a front end's workers. ``threads``, ``model`` and the size of the KV pool (``num_kv_blocks`` or, in bytes,
    ``kv_cache_memory``): in place of what the front end says, which knows its own host. ``give_up_s``: ends after so long without a front
    end (None: never). ``parent``: the process id of a front end that has started it, whose end is its own (None: whoever listens at the
    address will do). ``kv_listen``: where others bring KV to by TCP, port 0: any (None: where the front end is told, at any port)."""

    name: str
    role: str = "both"
    threads: int | None = None
    model: str | None = None
    give_up_s: float | None = None
    parent: int | None = None
    num_kv_blocks: int | None = None
    kv_cache_memory: int | None = None
    kv_listen: Address | None = None
    boot_id: str = field(default_factory=lambda: secrets.token_hex(8))


@dataclass(frozen=True, slots=True)
class WorkerPost:
    """What a worker that somebody starts has to know; plain data, to be sent to wherever it runs."""

    address: Address
    secret: bytes = field(repr=False)
    options: WorkerOptions


def run_worker(post: WorkerPost) -> str:
    """Work until the front end says that it is enough; why it ended. Raises what ``WorkerServer.run`` does."""
    from octavo.distributed.worker_handover import handing_over  # which builds on this module

    asyncio.run(WorkerServer(post.address, post.secret, post.options, make_kv=handing_over(post.secret)).run())
    return "the front end said that it is enough"


def next_wait_s(wait_s: float, was_refused: bool) -> float:
    """How long to wait after the next attempt, when it was ``wait_s`` after this one."""
    return min(2 * wait_s, REFUSED_S if was_refused else RETRY_S[1])


def own_config(config: EngineConfig, options: WorkerOptions) -> EngineConfig:
    """What this worker runs of the cluster's configuration. A file that one engine alone may write gets its name; stores of KV on disk are
    made to be shared, limit and all."""
    cache, scheduler, backend = config.cache, config.scheduler, config.backend
    if options.num_kv_blocks is not None or options.kv_cache_memory is not None:
        cache = replace(cache, num_kv_blocks=options.num_kv_blocks, kv_cache_memory=options.kv_cache_memory)
    if scheduler.record is not None:
        scheduler = replace(scheduler, record=unused(f"{scheduler.record}.{options.name}"))  # one that comes back records anew
    if options.threads is not None:
        backend = replace(backend, threads=options.threads)
    model = config.model if options.model is None else replace(config.model, model=options.model)
    return replace(config, model=model, cache=cache, scheduler=scheduler, backend=backend).validate()


class WorkerServer:
    """``load`` makes the engine of a configuration, on a thread of its own. ``make_kv``: what moves its KV, given the address that
    others reach this host by (None: nothing does)."""

    def __init__(
        self,
        address: Address,
        secret: bytes,
        options: WorkerOptions,
        load: Callable[[EngineConfig], Engine] = Engine.load,
        make_kv: MakeKV | None = None,
    ) -> None:
        self.options = options
        self.engine: WorkerEngine | None = None
        self._address, self._secret = address, secret
        self._load, self._make_kv = load, make_kv
        self._config = b""  # that the engine is made of
        self._loading: asyncio.Task[None] | None = None
        self._closing: asyncio.Task[None] | None = None  # of the engine before
        self._channel: Channel[ToWorker] | None = None
        self._is_ready = False  # the front end has been told
        self._has_joined = False  # and has said that it sends attempts
        self._failure: BaseException | None = None
        self._ended = asyncio.Event()
        self._leaves = False  # it has asked for its end
        self._refusal: str | None = None  # why the last connection came to nothing, as the front end said
        self._told_refusal = ""
        self._was_turned_away = False  # at the last attempt
        self._told_absence = ""  # why no front end was there, as it was last logged
        self._tasks: set[asyncio.Task[None]] = set()
        self._gone_s = 10.0
        self._host = LOCAL_HOST

    async def run(self) -> None:
        """Serve until told to end. Raises WorkerRefused, FrontEndLost, WorkerFailed, and what keeps the engine from being made."""
        loop = asyncio.get_running_loop()
        wait_s, served_s = RETRY_S[0], loop.time()
        try:
            while not self._ended.is_set():
                if self.options.parent not in (None, os.getppid()):  # another front end at its address has workers of its own
                    raise FrontEndLost("the front end that started it has ended")
                channel = await self._reach(served_s)
                has_served = channel is not None and await self._serve(channel)
                if self._leaves:  # who was asked is gone, and with it all that was to be done
                    self._end()
                if has_served:
                    wait_s, served_s, self._told_refusal = RETRY_S[0], loop.time(), ""
                else:  # nobody was there, or it came to nothing
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(self._ended.wait(), wait_s)
                    wait_s = next_wait_s(wait_s, self._was_turned_away or (channel is not None and self._refusal is not None))
            if self._failure is not None:
                raise self._failure
        finally:
            await self._close_engine()

    async def _reach(self, served_s: float) -> Channel[ToWorker] | None:
        """None: no front end is there now. ``served_s``: when there was one last; raises FrontEndLost where that is too long ago."""
        give_up_s = self.options.give_up_s
        try:
            channel = await connect(self._address, self._secret, to_worker)
        except OSError as error:
            self._was_turned_away = isinstance(error, ChannelClosed)
            hint = "; it may have another secret" if self._was_turned_away else ""
            if self._told_absence != str(error):
                self._told_absence = str(error)
                logger.info("no front end at %s yet: %s%s", self._address, error, hint)
            if give_up_s is not None and asyncio.get_running_loop().time() - served_s > give_up_s:
                raise FrontEndLost(f"no front end at {self._address} for {give_up_s:g} s: {error}{hint}") from error
            return None
        self._told_absence, self._was_turned_away = "", False
        return channel

    def leave(self, reason: str) -> None:
        """Ask the front end for nothing more, and for the end when what there is is done; without one end at once."""
        if self._channel is not None and self._is_ready:
            self._leaves = True
            self._channel.send(Goodbye(reason))
            logger.info("worker %s leaves: %s; it takes no more requests, and ends when those it has are done", self.options.name, reason)
        else:
            self._end()

    def _end(self, failure: BaseException | None = None) -> None:
        self._failure = self._failure or failure
        self._ended.set()

    # --- one connection -----------------------------------------------------------------------------------------------------------------

    async def _serve(self, channel: Channel[ToWorker]) -> bool:
        """From Hello to the end of the channel, or of the worker. Whether it was ready for this front end, and not refused."""
        closed, options = asyncio.Event(), self.options
        self._channel, self._refusal = channel, None
        channel.start(self._take, lambda reason: closed.set())
        channel.send(Hello(PROTOCOL, options.name, options.role, socket.gethostname(), os.getpid(), options.boot_id))
        self._start(self._beat(channel))
        tasks = [asyncio.create_task(event.wait()) for event in (self._ended, closed)]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (*tasks, *self._tasks):
                task.cancel()
            was_ready, self._is_ready, self._has_joined, self._channel = self._is_ready, False, False, None
            channel.close("the worker ends")
            if not self._ended.is_set() and self._refusal is None:
                logger.info("the front end is gone: %s", channel.closed_for)
            if self.engine is not None:
                self.engine.drop_all()
        return was_ready and self._refusal is None

    async def _beat(self, channel: Channel[ToWorker]) -> None:
        loop = asyncio.get_running_loop()
        while channel.closed_for is None:
            if self.engine is not None and self._is_ready:
                self.engine.beat()
            else:
                channel.send(self._early_load())
            if loop.time() - channel.heard_s > self._gone_s:
                channel.abort(f"it has said nothing for {self._gone_s:g} s")
            await asyncio.sleep(HEARTBEAT_S)

    def _early_load(self) -> Load:
        """The heartbeat before Ready: no figures are known, but whether an engine that there is from before makes progress."""
        return Load(step_age_s=0.0 if self.engine is None else self.engine.thread.silent_s)

    def _send(self, message: FromWorker) -> None:
        """Raises MessageError. Goes nowhere while no front end is ready for it."""
        if self._channel is not None and self._is_ready:
            self._channel.send(message)

    def _take(self, messages: list[ToWorker]) -> None:
        for message in messages:
            match message:
                case Welcome():
                    self._start(self._make_ready(message))
                case Refuse():
                    self._refused(message)
                case Shutdown():
                    self._end()
                case Beat():
                    if message.has_joined:
                        self._join()
                case _:
                    self._take_work(message)

    def _join(self) -> None:
        """The front end has taken it; before that it might yet have been refused."""
        if not self._has_joined:
            self._has_joined = True
            logger.info("worker %s is ready, for the front end at %s", self.options.name, self._address)

    def _refused(self, message: Refuse) -> None:
        """For now, and then it tries again, more and more seldom, and says so once; or for good: whoever runs it is told."""
        self._refusal = message.reason
        if message.is_final:
            self._end(WorkerRefused(message.reason))
        elif message.reason != self._told_refusal:
            self._told_refusal = message.reason
            logger.error("the front end refuses this worker for now, and it tries again: %s", message.reason)

    def _take_work(self, message: ToWorker) -> None:
        engine = self.engine
        if engine is None or not self._is_ready:
            raise MessageError(f"{type(message).__name__} comes before this worker is ready")
        match message:
            case Submit():
                engine.submit(message)
            case Abort():
                engine.abort(message.keys)
            case Reserve() | Send() | Begin() | Release() | Cancel() | Resume():
                engine.take_kv(message)
            case Reset():
                engine.drop_all()
            case Ask():
                self._start(self._answer(engine.engine, message))

    def _start(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        """End the worker; its front end is told why, and ``run`` raises it."""
        logger.info("the worker ends: %s", error)
        if self._channel is not None:
            self._channel.send(Goodbye(str(error)))
        self._end(error)

    async def _answer(self, engine: Engine, question: Ask) -> None:
        reply = await answer(engine, question)
        try:
            self._send(reply)
        except MessageError as error:
            self._send(Answer(question.number, error=str(error)))

    # --- the engine ---------------------------------------------------------------------------------------------------------------------

    async def _make_ready(self, welcome: Welcome) -> None:
        """Load what the front end wants, unless it is there, and say so."""
        channel, self._gone_s = self._channel, welcome.gone_s
        own, kv_listen = None if channel is None else channel.local_host, self.options.kv_listen
        self._host = kv_listen.host if kv_listen is not None else welcome.kv_host or own or LOCAL_HOST
        if self._loading is None or self._config != welcome.config:
            if self._loading is not None:
                await asyncio.wait((self._loading,))
            await self._close_engine()  # or wait for its end, which an earlier connection has begun: there is no memory for two
            self._config = welcome.config
            self._loading = asyncio.create_task(self._make_engine(welcome.config))
        await asyncio.shield(self._loading)
        if channel is not None and channel is self._channel and not self._is_ready and self.engine is not None:
            channel.send(self._early_load())  # so that nothing is sent to an engine that hangs
            if self.engine.kv is not None:  # an engine that was made for another front end was reached by another address, perhaps
                self.engine.kv.listen(self._host)
            channel.send(ready_of(self.engine))
            self._is_ready = True
            self.engine.begin_connection(welcome.wants_prices)

    async def _make_engine(self, config: bytes) -> None:
        loaded = await asyncio.to_thread(self._load, own_config(config_of(config), self.options))
        worker = WorkerEngine(loaded, self._send, lambda reason: self._fail(WorkerFailed(reason)))
        try:
            if self._make_kv is not None:
                worker.kv = self._make_kv(worker, self._host)
        except BaseException as error:
            await asyncio.to_thread(loaded.close)
            if isinstance(error, OSError) and self.options.kv_listen is not None:
                raise ConfigError(f"kv_listen: {self.options.kv_listen} is not allowed; nobody can listen there: {error}") from error
            raise
        gc.collect()
        gc.freeze()  # what is loaded stays: full collections need not walk the vocabulary in the middle of a stream
        worker.thread.start()
        self.engine = worker

    async def _close_engine(self) -> None:
        """When this returns there is none. It is closed also when whoever waits for it is cancelled, as its connection has ended."""
        engine, self.engine, self._loading = self.engine, None, None
        if engine is not None:
            self._closing = asyncio.create_task(self._close(engine))
        if self._closing is not None:
            await asyncio.shield(self._closing)

    async def _close(self, engine: WorkerEngine) -> None:
        await engine.close()
        gc.unfreeze()
