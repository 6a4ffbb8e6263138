"""The last ended requests, and sums over all that have ever ended. Bounded: by a number of records, and by the block keys that they hold.

What becomes of a request after its last token, waiting for other prompts and being written to its client, is charged here.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable

from octavo.engine.causes import NUM_CAUSES, Cause
from octavo.engine.request_record import RequestRecord

CAPACITY = 2048  # ended requests that are remembered
MAX_KEYS = 1 << 18  # block keys of all of them together, 2 MiB


class EndedRecords:
    """``totals`` [NUM_CAUSES]: seconds of all ended requests. ``forgotten_s``: requests that ended by then are not remembered."""

    def __init__(self, capacity: int = CAPACITY) -> None:
        if capacity < 1:
            raise ValueError(f"capacity: {capacity!r} is not allowed; at least 1 request")
        self.capacity = capacity
        self.totals = [0.0] * NUM_CAUSES
        self.own_missed_s = 0.0
        self.forgotten_s = -math.inf
        self._records: OrderedDict[str, RequestRecord] = OrderedDict()  # oldest first
        self._keyed: OrderedDict[str, RequestRecord] = OrderedDict()  # those of them that have keys
        self._num_keys = 0

    def add(self, record: RequestRecord) -> None:
        for cause, seconds in enumerate(record.seconds):
            self.totals[cause] += seconds
        self.own_missed_s += record.own_missed_s
        replaced = self._records.pop(record.request_id, None)
        if replaced is not None:
            self._drop_keys(replaced)
        self._records[record.request_id] = record
        if record.keys:
            self._keyed[record.request_id] = record
            self._num_keys += len(record.keys)
        while len(self._records) > self.capacity:
            _, oldest = self._records.popitem(last=False)
            self.forgotten_s = oldest.ended_s or self.forgotten_s
            self._drop_keys(oldest)
        while self._num_keys > MAX_KEYS:
            self._drop_keys(next(iter(self._keyed.values())))

    def _drop_keys(self, record: RequestRecord) -> None:
        if self._keyed.pop(record.request_id, None) is not None:
            self._num_keys -= len(record.keys)
            record.keys = record.keys[:0]

    def find(self, request_id: str) -> RequestRecord | None:
        return self._records.get(request_id)

    def records(self) -> list[RequestRecord]:
        """Oldest first."""
        return list(self._records.values())

    def delivered(self, request_ids: Iterable[str], now_s: float) -> None:
        """The last byte of these requests, which are answered together, was handed to the connection at ``now_s``."""
        ended = [r for r in map(self._records.get, request_ids) if r is not None and r.sent_s is None]
        ready_s = max((record.ended_s or 0.0 for record in ended), default=0.0)
        for record in ended:
            ended_s = record.ended_s or 0.0
            record.sent_s = max(now_s, ended_s)
            left_s = record.sent_s - ended_s
            for cause, seconds in (
                (Cause.OTHER_PROMPTS, ready_s - ended_s), (Cause.SLOW_READER, record.tail_blocked_s), (Cause.DELIVERY, left_s),
            ):  # fmt: skip
                part_s = min(seconds, left_s)
                record.charge(cause, part_s)
                self.totals[cause] += part_s
                left_s -= part_s
