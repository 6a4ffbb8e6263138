"""What a user of the Python API says about a beam search, under vLLM's names. The rule is in ``core.beam``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from octavo.core.request import BeamParams, ParameterError, SamplingParams


@dataclass(frozen=True, slots=True)
class BeamSearchParams:
    """``beam_width`` hypotheses are followed, the ``n`` best (None: all) come back.

    score = sum of log-probabilities / generated tokens ** ``length_penalty``, where the token that ends a hypothesis counts in the sum
    and not in the length. ``early_stopping``: as in transformers, True, False or "never" (see ``BeamParams``). ``temperature`` is there
    for callers of vLLM: 0, since nothing is drawn. ``logprobs`` k: an entry for each token, with so many alternatives.
    """

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False
    n: int | None = None
    early_stopping: bool | str = False
    min_tokens: int = 0
    stop_token_ids: Sequence[int] = ()
    logprobs: int | None = None
    skip_special_tokens: bool = True

    def sampling_params(self) -> SamplingParams:
        """As the engine takes them; their ranges are checked there. Raises ParameterError for what is no beam width at all."""
        if type(self.beam_width) is not int:
            raise ParameterError("beam_width", self.beam_width, "an integer")
        return SamplingParams(
            n=self.beam_width if self.n is None else self.n,
            temperature=self.temperature,
            max_tokens=self.max_tokens,
            min_tokens=self.min_tokens,
            ignore_eos=self.ignore_eos,
            stop_token_ids=tuple(self.stop_token_ids),
            logprobs=self.logprobs,
            include_stop_str_in_output=self.include_stop_str_in_output,
            skip_special_tokens=self.skip_special_tokens,
            beam=BeamParams(self.beam_width, self.length_penalty, self.early_stopping),
        )
