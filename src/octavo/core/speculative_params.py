"""What a request asks of speculative decoding. A record and its limits; drafts are made in ``speculative/``, verified in ``backends/``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from octavo.config import MAX_DRAFTS, METHOD_SETTINGS
from octavo.core.request import ParameterError


@dataclass(frozen=True, slots=True)
class SpeculativeParams:
    """``num_drafts``: "auto" (as many as pay, none included), "off", or K: always K where the proposer has them (0 is "off").

    ``method`` names a proposer of the engine; "auto" is the best of those that need no model. Nothing here changes a token.
    """

    num_drafts: int | str = "auto"
    method: str = "auto"

    @classmethod
    def of(cls, given: SpeculativeParams | Mapping[str, Any] | None) -> SpeculativeParams | None:
        """From the fields of a request. Raises ParameterError for one that there is not."""
        if given is None or isinstance(given, cls):
            return given
        if not isinstance(given, Mapping):
            raise ParameterError("speculative", given, "an object with num_drafts and method, or one of them")
        if unknown := given.keys() - {"num_drafts", "method"}:
            raise ParameterError("speculative", sorted(map(str, unknown)), "it has the fields num_drafts and method and no others")
        params = cls(**given)
        if not isinstance(params.method, str):
            raise ParameterError("speculative.method", params.method, "the name of a method")
        return params

    def validate(self, methods: frozenset[str] | set[str]) -> None:
        """``methods``: the proposers that this engine has. Raises ParameterError."""
        k = self.num_drafts
        if not (k in ("auto", "off") if isinstance(k, str) else type(k) is int and 0 <= k <= MAX_DRAFTS):
            raise ParameterError("speculative.num_drafts", k, f'"auto", "off", or an integer from 0 to {MAX_DRAFTS}')
        if self.method != "auto" and self.method not in methods:
            setting = METHOD_SETTINGS.get(self.method)
            more = "" if setting is None else f"; a server has it where --{setting.replace('_', '-')} is given"
            raise ParameterError("speculative.method", self.method, f"one of {', '.join(['auto', *sorted(methods)])}{more}")

    @property
    def enabled(self) -> bool:
        return self.num_drafts not in ("off", 0)
