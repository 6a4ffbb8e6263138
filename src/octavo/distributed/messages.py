"""The control protocol between a front end and its workers: every message as a typed record. What travels in them is ``wire``'s.

    worker                                       front end
      Hello ───────────────────────────────────────▶            who it is, before it has loaded anything
            ◀─────────────────────────────── Welcome | Refuse   the configuration to run
      Ready ───────────────────────────────────────▶            what it can take
            ◀──────────────────────────────── Beat | Refuse     it is one of the front end's: requests may come
      Load, Keys ... ──────────────────────────────▶            the heartbeat of a worker
            ◀──────────────────────────────────── Beat ...      the heartbeat of a front end
            ◀───────────────────────────────────── Submit       a request, or the rest of one
      Events ... ──────────────────────────────────▶
            ◀────────────────────────────────────── Abort

Bytes are MessagePack maps, tagged by "t"; fields that have their defaults are left out, fields that a reader does not know are skipped.
Within one ``PROTOCOL`` number fields may be added, never changed. Nothing here waits, sends, or keeps state; ``channel`` moves the bytes.

``key`` names one *attempt* to answer a request. It is never used again, so that what an abandoned attempt still says is told apart. An
attempt that is handed over keeps its key on both workers.
"""

from __future__ import annotations

import msgspec

from octavo.config import EngineConfig
from octavo.core.request import ParameterError
from octavo.distributed.wire import Event, MessageError, Ticket, WireRequest, WorkerLimits
from octavo.distributed.worker_account import WorkerAccount

PROTOCOL = 1
SHORT_KEY_BYTES = 8  # of a block's key: what routing compares
MAX_NAME_CHARS = 128
MAX_BOOT_ID_CHARS = 64
MAX_FIGURE = 1 << 53  # of tokens, seconds, blocks or steps that a worker tells
MAX_REASON_CHARS = 1000


class Message(msgspec.Struct, tag_field="t", omit_defaults=True, gc=False):
    """Any of them. Records: nothing changes one after it was made."""


# --- worker → front end -----------------------------------------------------------------------------------------------------------------


class Hello(Message, tag="hello"):
    """The first message. ``boot_id``: drawn when the process began, so that a worker that comes back is told from one that was gone;
    at most ``MAX_BOOT_ID_CHARS`` (it is the worker's own to choose, and much is kept by it)."""

    protocol: int
    name: str
    role: str
    host: str
    pid: int
    boot_id: str


class Ready(Message, tag="ready"):
    """The model is loaded. ``fingerprint``: of all that answers and KV depend on besides tokens; one front end's workers have the same.

    ``kv_address``: where other workers bring KV to (None: nowhere), by one of ``transports``, as ``kv_ways`` reads it.
    """

    model: str
    fingerprint: str
    limits: WorkerLimits
    kv_address: str | None = None
    transports: list[str] = []


class Load(Message, tag="load"):
    """How busy a worker is; also its heartbeat. ``step_age_s``: since its loop last made progress while there was something to do, else 0.

    ``pending_tokens``: known tokens without KV, of waiting and running sequences; ``pending_s``: seconds that they are predicted to take.
    ``num_offered`` and ``num_reserved``: sequences that wait here for KV to go out or to come in. ``num_received``: requests that had come
    by this channel when these figures were read. ``prompt_token_s`` and ``output_token_s``: what a token takes of a full step,
    where ``Welcome`` asked for it.
    """

    num_steps: int = 0
    step_age_s: float = 0.0
    num_waiting: int = 0
    num_running: int = 0
    pending_tokens: int = 0
    pending_s: float = 0.0
    num_available_blocks: int = 0
    num_used_blocks: int = 0
    num_offered: int = 0
    num_reserved: int = 0
    num_received: int = 0
    prompt_token_s: float = 0.0
    output_token_s: float = 0.0


class Keys(Message, tag="keys"):
    """Blocks that have come into the worker's prefix cache, and have gone since; of their keys the first ``SHORT_KEY_BYTES``.

    ``anew``: what was said before, by whoever it was, does not hold any more; said once, after ``Ready``. One without keys is a heartbeat
    of a worker that has no ``Load`` to tell yet: ``step_age_s`` is as in ``Load`` (None: this is none).
    """

    published: list[bytes] = []
    forgotten: list[bytes] = []
    anew: bool = False
    step_age_s: float | None = None


class Events(Message, tag="events"):
    """What one step, or a few, gave the attempts of this worker, in order."""

    events: list[Event]


class PromptStarted(Message, tag="started"):
    """The first piece of a prompt with a ticket is being computed."""

    key: int


class Offered(Message, tag="offered"):
    """It has drawn its first token and waits to be handed over. The event of the token has been sent. ``account``: where its time went up
    to here."""

    key: int
    output_token_ids: list[int]
    account: WorkerAccount | None = None


class Reserved(Message, tag="reserved"):
    """There is room for its KV, and a place to run."""

    key: int


class NoRoom(Message, tag="noroom"):
    """There is none now. ``reason``: there never will be."""

    key: int
    reason: str | None = None


class Copied(Message, tag="copied"):
    """All of its KV has arrived here."""

    key: int


class CopyFailed(Message, tag="copyfailed"):
    """It will not: said by either side."""

    key: int
    reason: str


class Answer(Message, tag="answer"):
    """To ``Ask`` number ``number``: JSON, or why there is none."""

    number: int
    body: bytes = b"null"
    error: str | None = None


class Goodbye(Message, tag="goodbye"):
    """The worker wants to leave: it is to get nothing new, and ``Shutdown`` when what it has is done."""

    reason: str


# --- front end → worker -----------------------------------------------------------------------------------------------------------------


class Welcome(Message, tag="welcome"):
    """``config``: the EngineConfig to run, as JSON. ``gone_s``: a front end silent for so long has gone. ``wants_prices``: those of
    full steps with every ``Load``, for whoever scales by them. ``kv_host``: where to listen for KV (empty: at this end of the channel)."""

    config: bytes
    gone_s: float = 10.0
    wants_prices: bool = False
    kv_host: str = ""


class Refuse(Message, tag="refuse"):
    """The worker cannot be one of this front end's; the channel is closed after it. ``is_final``: trying again is of no use."""

    reason: str
    is_final: bool = True


class Beat(Message, tag="beat"):
    """The front end is there. ``has_joined``: it has heard Ready, and gives the worker requests from now on."""

    has_joined: bool = False


class Submit(Message, tag="submit"):
    """Answer ``request`` under ``key``. With ``output_token_ids`` go on after them: their text has been sent. ``ticket``: compute the
    prompt and the first token, then hand it over."""

    key: int
    request: WireRequest
    output_token_ids: list[int] = []
    ticket: Ticket | None = None


class Abort(Message, tag="abort"):
    """Nobody wants these any more, wherever they are: in the queue, running, offered or reserved. No event of them follows but one with
    the account of each that there was."""

    keys: list[int]


class Reserve(Message, tag="reserve"):
    """Blocks for the KV of the ``num_tokens`` tokens of the prompt and a place to run."""

    key: int
    request: WireRequest
    num_tokens: int


class Send(Message, tag="send"):
    """Bring the attempt's KV to the worker at ``kv_address``, what is computed at once and the rest as it is. ``wire_dtype`` auto: as
    stored. ``checksum``: one of ``transport.CHECKSUMS``, over each piece."""

    key: int
    kv_address: str
    transport: str = "tcp"
    wire_dtype: str = "auto"
    checksum: str = "none"


class Begin(Message, tag="begin"):
    """To the receiver, which has all the KV: run it after these tokens."""

    key: int
    output_token_ids: list[int]


class Release(Message, tag="release"):
    """To the sender: somebody else goes on with it."""

    key: int


class Cancel(Message, tag="cancel"):
    """To the receiver: it does not come."""

    key: int


class Resume(Message, tag="resume"):
    """To the sender: nobody takes it; go on with it here."""

    key: int


class Ask(Message, tag="ask"):
    """A question that is answered beside the steps. ``args``: JSON."""

    number: int
    what: str
    args: bytes = b"{}"


class Reset(Message, tag="reset"):
    """Drop every attempt: their requests have been given to others meanwhile."""


class Shutdown(Message, tag="shutdown"):
    """End the process in good order."""


FromWorker = (
    Hello | Ready | Load | Keys | Events | PromptStarted | Offered | Reserved | NoRoom | Copied | CopyFailed | Answer | Goodbye
)
ToWorker = (
    Welcome | Refuse | Beat | Submit | Abort | Reserve | Send | Begin | Release | Cancel | Resume | Ask | Reset | Shutdown
)

_ENCODER = msgspec.msgpack.Encoder()
_FROM_WORKER: msgspec.msgpack.Decoder[FromWorker] = msgspec.msgpack.Decoder(FromWorker)
_TO_WORKER: msgspec.msgpack.Decoder[ToWorker] = msgspec.msgpack.Decoder(ToWorker)


def encode(message: Message) -> bytes:
    """Raises MessageError for text that is no Unicode."""
    try:
        return _ENCODER.encode(message)
    except (UnicodeEncodeError, OverflowError, TypeError) as error:
        raise MessageError(f"a {type(message).__name__} message cannot be written: {error}") from error


def from_worker(data: bytes | bytearray | memoryview) -> FromWorker:
    """Raises MessageError."""
    try:
        return _FROM_WORKER.decode(data)
    except (msgspec.MsgspecError, ParameterError, RecursionError) as error:
        raise MessageError(f"a worker said what is no message of protocol {PROTOCOL}: {error}") from error


def to_worker(data: bytes | bytearray | memoryview) -> ToWorker:
    """Raises MessageError."""
    try:
        return _TO_WORKER.decode(data)
    except (msgspec.MsgspecError, ParameterError, RecursionError) as error:
        raise MessageError(f"a front end said what is no message of protocol {PROTOCOL}: {error}") from error


def check_name(name: str) -> None:
    """MessageError for a name that logs, metrics and terminals could not show as it is, or that names no folder of its own: what a worker
    keeps on disk is below its name."""
    is_path = "/" in name or name in (".", "..")
    if not 0 < len(name) <= MAX_NAME_CHARS or not name.isascii() or not name.isprintable() or " " in name or is_path:
        allowed = f"1 to {MAX_NAME_CHARS} printable ASCII characters, none of them a blank or a slash, and neither . nor .."
        raise MessageError(f"name: {name[:MAX_NAME_CHARS]!r} is not allowed; {allowed}")


def check_figure(message: Load | Keys, name: str) -> None:
    """MessageError for a figure that there cannot be. Prices are learned from sums of squares of some."""
    if not 0 <= (value := getattr(message, name)) <= MAX_FIGURE:
        raise MessageError(f"a worker's {type(message).__name__} cannot be: {name} {value!r} is not allowed; from 0 to {MAX_FIGURE}")


def shown_reason(reason: str) -> str:
    """A reason that a peer gives, as logs and terminals may show it."""
    return "".join(c if c.isprintable() else "?" for c in reason[:MAX_REASON_CHARS])


def config_bytes(config: EngineConfig) -> bytes:
    """A configuration as JSON."""
    return msgspec.json.encode(config)


def config_of(data: bytes) -> EngineConfig:
    """The configuration that ``config_bytes`` wrote, validated. Raises MessageError, ConfigError."""
    try:
        config = msgspec.json.decode(data, type=EngineConfig)
    except msgspec.MsgspecError as error:
        raise MessageError(f"the front end's configuration cannot be read: {error}") from error
    return config.validate()
