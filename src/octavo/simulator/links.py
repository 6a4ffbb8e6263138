"""The links of a simulated cluster: one for each engine that sends, and those of pairs that differ. Made when they are first used."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from octavo.distributed.handoff import Link


class Links:
    """``link``: what every sender has, to all others, for all its copies; ``pairs``: (sender, receiver) with a link of their own. Nothing
    has gone over any yet."""

    def __init__(self, link: Link, pairs: Mapping[tuple[int, int], Link]) -> None:
        self._link = link
        self._pairs = {pair: replace(own) for pair, own in pairs.items()}
        self._senders: dict[int, Link] = {}

    def between(self, sender: int, receiver: int | None) -> Link:
        own = None if receiver is None else self._pairs.get((sender, receiver))
        if own is not None:
            return own
        if sender not in self._senders:
            self._senders[sender] = replace(self._link)
        return self._senders[sender]


def parse_links(text: str) -> dict[tuple[int, int], Link]:
    """Links of pairs from "0-2=1e9,0-3=1e9:0.01": SENDER-RECEIVER=BYTES_PER_S[:LATENCY_S]. Raises ValueError."""
    links = dict[tuple[int, int], Link]()
    for part in text.split(","):
        pair, _, figures = part.strip().partition("=")
        ends, (rate, _, latency) = pair.split("-"), figures.partition(":")
        try:
            sender, receiver = (int(end) for end in ends)
            link = Link(float(rate), float(latency) if latency else 1e-4)
        except ValueError:
            raise ValueError(f"links: {part!r} is not allowed; SENDER-RECEIVER=BYTES_PER_S[:LATENCY_S], separated by commas") from None
        if sender == receiver or min(sender, receiver) < 0 or not link.bytes_per_s < float("inf") or not link.latency_s < float("inf"):
            raise ValueError(f"links: {part!r} is not allowed; two different engines, numbered from 0, and finite figures")
        if (sender, receiver) in links:
            raise ValueError(f"links: {pair!r} is given twice")
        links[sender, receiver] = link
    return links
