"""A recorded window as a load for the simulator: prompts from the keys of their blocks, arrivals as they were, or a closed loop.

Token ids are made of keys, so blocks are equal where they were equal; what the prefix cache had before the window is computed ahead of it.
Nothing is drawn at random.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from octavo.core.cluster_window import ClusterWindow
from octavo.core.cost import StepShape
from octavo.core.recorded_window import Figures, RecordedWindow, WindowEngine, WindowRequest, figures_of
from octavo.core.request import derive_seed
from octavo.costs.coefficients import Coefficients
from octavo.simulator.records import RequestRecord
from octavo.workload.requests import WorkloadRequest

SEED = 0  # of the simulations: it names the sequences' texts
_DIGIT_BITS = 15
_OWN_TOKEN = 1 << 20  # above all digits: tokens of part-filled blocks, which are nobody else's
_MOST_MISSING = 0.02  # of the compared requests that a simulation may leave out, refused ones, before it tells nothing
_SKIPPED_SHARE = 0.1  # of the requests of a window that begins under load
_THINK_S = 0.02  # a client that has one request at a time sends the next within this
_SAME_S = 1e-6  # moments that rounding parts
_CLOSED_SHARE = 0.9  # of the arrivals that follow an end so soon
_FEW = 20  # requests from which a closed loop can be told


class RecordedText:
    """A TextSource: each sequence says what its blocks' keys spell, so that a later prompt may find it in the cache."""

    def __init__(self, tokens_of: dict[int, list[int]]) -> None:
        self._tokens_of = tokens_of  # by seed, prompt included

    def token(self, key: int, position: int) -> int:
        tokens = self._tokens_of[key]
        return tokens[position] if position < len(tokens) else _OWN_TOKEN


@dataclass(frozen=True, slots=True)
class WindowLoad:
    """``compared``: by the number of their request, those whose measured times are held against the simulated ones. ``concurrency``: of a
    closed loop; None: requests come when they came. ``shares_prefixes``: whether some begin alike. ``num_warming``: requests at the
    beginning that only fill the cache; ``warmed``: of a cluster, which worker's, by the place of that. ``begin_s``: when the window begins
    behind them."""

    requests: tuple[WorkloadRequest, ...]
    compared: dict[int, WindowRequest]
    concurrency: int | None
    text: RecordedText | None
    shares_prefixes: bool
    num_warming: int
    warmed: tuple[int, ...] = ()
    begin_s: float = 0.0

    def figures(self, records: Iterable[RequestRecord], way_s: float = 0.0) -> Figures:
        """Of the compared requests, as a simulation has answered them. ``way_s``: what each took beside that. Nothing is told when it left
        out too many."""
        ended = [
            WindowRequest(
                record.arrival_s, 0, record.num_output, 0, wall_s=record.e2e_s + way_s,
                ttft_s=None if record.ttft_s is None else record.ttft_s + way_s, itl_s=record.itl_s,
            )
            for record in records
            if int(record.request_id) in self.compared
        ]  # fmt: skip
        return figures_of(ended if len(ended) >= (1.0 - _MOST_MISSING) * len(self.compared) else ())

    def measured(self) -> Figures:
        """Of the compared requests, as they were."""
        return figures_of(list(self.compared.values()))

    def notes(self, engine: WindowEngine) -> tuple[str, ...]:
        """What of the run is taken to be so, or left out."""
        notes = []
        if self.concurrency is not None:
            notes.append(f"taken as a closed loop: {self.concurrency} clients that each wait for their answer")
        if engine.acceptance is None and engine.foreseen is None:
            notes.append("too few answers have been seen to tell what speculation would gain")
        if engine.has_tiers:
            notes.append("the tiers of the KV cache are left out")
        return tuple(notes)


def tokens_of(request: WindowRequest, block_size: int, number: int) -> list[int]:
    """Token ids of prompt and output: a block's are the digits of its key and salt, those behind the last full block nobody else's."""
    total, out = request.num_prompt + request.num_output, list[int]()
    for plain in request.keys[: total // block_size]:
        key = plain ^ request.salt
        digits = [key >> (_DIGIT_BITS * place) & ((1 << _DIGIT_BITS) - 1) for place in range(min(block_size, 5))]
        out += digits
        out += [0] * (block_size - len(digits))
    return out + [_OWN_TOKEN + number] * (total - len(out))


def load_of(window: RecordedWindow | ClusterWindow, cost: Coefficients) -> WindowLoad:
    """``cost`` tells how long filling the cache takes, before which the window does not begin. Sessions are those that clients named, of a
    cluster; of one engine prompts that begin alike are taken to be one."""
    block_size = int(window.engine.cache["block_size"])
    warming = _warming(window, block_size) if window.engine.cache["enable_prefix_caching"] else []
    begin_s = 2.0 * sum(_alone_s(request.num_prompt, cost) for request in warming)
    sessions = Counter(request.keys[0] for request in window.requests if request.keys and request.num_prompt >= block_size)
    requests, compared, texts = list[WorkloadRequest](), dict[int, WindowRequest](), dict[int, list[int]]()
    num_skipped = 0 if window.starts_idle else round(_SKIPPED_SHARE * len(window.requests))
    for place, one in enumerate([*warming, *window.requests]):
        is_warming = place < len(warming)
        for _ in range(one.num_choices):
            number = len(requests)
            tokens = texts[derive_seed(SEED, number + 1)] = tokens_of(one, block_size, number)
            arrival_s = 0.0 if is_warming else begin_s + one.arrival_s
            session = str(one.keys[0]) if one.keys and sessions[one.keys[0]] > 1 else None
            session = session if isinstance(window, RecordedWindow) else _named(one.session)
            made = max(1, one.num_output)
            asked = one.priority, _named(one.user), max(made, one.max_tokens)
            requests.append(WorkloadRequest(arrival_s, tokens[: one.num_prompt], made, session, *asked))
            if not is_warming and place - len(warming) >= num_skipped and one.wall_s is not None and one.num_choices == 1:
                compared[number] = one
    text = RecordedText(texts) if _answers_are_prompted(window.requests, block_size) else None
    shares = any(count > 1 for count in sessions.values())
    warmed = tuple(one.worker for one in warming)
    return WindowLoad(tuple(requests), compared, concurrency_of(window.requests), text, shares, len(warming), warmed, begin_s)


def _named(key: int) -> str | None:
    return str(key) if key else None


def _alone_s(num_tokens: int, cost: Coefficients) -> float:
    shape = StepShape()
    shape.add(0, num_tokens, 1)
    return cost.seconds_of(shape)


def _warming(window: RecordedWindow | ClusterWindow, block_size: int) -> list[WindowRequest]:
    """Prompts that had been computed before the window, as far as its requests found them in the cache and nobody in it had made them
    there."""
    known, found = set[tuple[int, int, int]](), list[WindowRequest]()
    for request in window.requests:
        keys, salt, worker = request.keys[: request.num_cached // block_size], request.salt, request.worker
        if keys and (keys[-1], salt, worker) not in known:
            found.append(WindowRequest(0.0, len(keys) * block_size, 0, 1, keys=keys, salt=salt, worker=worker))
            known.update((key, salt, worker) for key in keys)
        known.update((key, salt, worker) for key in request.keys)
    return found


def _answers_are_prompted(requests: Seq[WindowRequest], block_size: int) -> bool:
    """Whether a block that an answer filled begins somebody's prompt, as in conversations."""
    answered = set[int]()
    for request in requests:
        place = request.num_prompt // block_size
        if any(key in answered for key in request.keys[:place]):
            return True
        answered.update(request.keys[place:])
    return False


def concurrency_of(requests: Seq[WindowRequest]) -> int | None:
    """Of clients that each wait for an answer before they ask again; None where requests come by themselves.

    Told by arrivals that each follow an end of another request at once, one by one, but for as many as are ever under way together.
    """
    ends_s = sorted(request.arrival_s + request.wall_s for request in requests if request.wall_s is not None)
    if len(requests) < _FEW or len(ends_s) < len(requests) // 2:
        return None
    most = num_ended = num_answered = 0  # ends up to now, and those that were followed by an arrival or too long ago to be
    follows = list[bool]()
    for number, request in enumerate(requests, 1):
        while num_ended < len(ends_s) and ends_s[num_ended] <= request.arrival_s + _SAME_S:
            num_ended += 1
        while num_answered < num_ended and ends_s[num_answered] < request.arrival_s - _THINK_S:
            num_answered += 1
        most = max(most, number - num_ended)
        follows.append(num_answered < num_ended)
        num_answered += follows[-1]
    after = follows[most:]
    return most if after and sum(after) >= _CLOSED_SHARE * len(after) else None
