"""A work with drafts, as figures of one stream have it: what is answered, by which drafts, and how. Measures nothing."""

from __future__ import annotations

from dataclasses import dataclass

from octavo.bench.spec import SpecCase
from octavo.bench.spec_prompts import WORKS

METHODS = {"ngram": "prompt lookup", "self": "first layers"}
"""What drafts come from, by the engine's name for it."""


@dataclass(frozen=True, slots=True)
class DraftedWork:
    """``work``: of ``bench.spec_prompts``; ``method``: of METHODS."""

    work: str
    method: str
    temperature: float

    def __str__(self) -> str:
        return f"{self.work} by {METHODS[self.method]}, T = {self.temperature:g}"

    def prompts(self, most: int) -> tuple[str, ...]:
        """The first ``most`` of the work's."""
        return next(known.prompts for known in WORKS if known.name == self.work)[:most]

    def case(self, num_output: int, repeat: int, k: int) -> SpecCase:
        """One stream, ``k`` drafts a step."""
        return SpecCase((self.work,), (1,), num_output, repeat, self.temperature, k, self.method, False)
