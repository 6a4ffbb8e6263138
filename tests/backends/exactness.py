"""Runs prompts through scheduler and cpu backend in a given configuration and keeps the raw logit bytes of every step."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from octavo.backends.cpu.backend import CpuBackend
from octavo.config import BackendConfig, CacheConfig, EngineConfig, SchedulerConfig
from octavo.core.request import Request, SamplingParams
from octavo.core.scheduler import Scheduler
from octavo.core.step import TokenLogprobs
from octavo.models.loaded import LoadedModel, WeightTensor

GREEDY = SamplingParams(temperature=0.0)
Logits = dict[tuple[str, int], bytes]  # (request id, position of the row) -> digest of its logits' bytes


@dataclass(frozen=True)
class Setup:
    """One configuration of the matrix."""

    threads: int = 2
    block_size: int = 16
    chunk: int = 4096
    num_blocks: int = 2048
    max_num_seqs: int = 1
    prefix_caching: bool = False
    compute: str = "fast"
    kv_dtype: str = "auto"
    granularity: str = "block"

    def config(self) -> EngineConfig:
        return EngineConfig(
            cache=CacheConfig(
                self.block_size,
                num_kv_blocks=self.num_blocks,
                kv_cache_dtype=self.kv_dtype,
                enable_prefix_caching=self.prefix_caching,
                prefix_granularity=self.granularity,
            ),
            scheduler=SchedulerConfig(max_num_seqs=self.max_num_seqs, max_num_batched_tokens=max(self.chunk, self.max_num_seqs)),
            backend=BackendConfig(threads=self.threads, compute=self.compute),
        )


class Run:
    """A backend and a scheduler that live through several batches, so that prefix hits can be had."""

    def __init__(self, model: LoadedModel, setup: Setup, max_model_len: int = 4096) -> None:
        config = setup.config()
        self.backend = CpuBackend(model, config)
        self.backend.allocate_kv(setup.num_blocks)
        self.scheduler = Scheduler(config.scheduler, config.cache, setup.num_blocks, max_model_len)
        self.logits: Logits = {}
        self.tokens: dict[str, list[int]] = {}
        self.logprobs: dict[str, list[TokenLogprobs]] = {}
        self.cached: dict[str, int] = {}
        self.guess: Callable[[str, int], list[int]] = lambda name, num_output: []  # drafts behind so many output tokens
        self._requests: dict[int, str] = {}
        self.backend.logits_hook = self._keep

    def _keep(self, seq_id: int, position: int, logits: np.ndarray) -> None:
        self.logits[self._requests[seq_id], position] = hashlib.blake2b(logits.tobytes(), digest_size=16).digest()

    def batch(self, prompts: dict[str, Sequence[int]], num_output: int, params: SamplingParams = GREEDY) -> Run:
        """Compute all prompts together, greedy, each with its own number of steps; returns self."""
        for name, ids in prompts.items():
            self.scheduler.add(Request(name, list(ids), replace(params, max_tokens=num_output, ignore_eos=True), seed=1))
        while self.scheduler.has_work:
            drafts = {s.seq_id: self.guess(s.request.request_id, s.num_output_tokens) for s in self.scheduler.decoding_sequences}
            plan = self.scheduler.plan(drafts=drafts)
            assert plan is not None
            for seq in self.scheduler.in_flight_sequences:
                self._requests[seq.seq_id] = seq.request.request_id
            for event in self.scheduler.apply(self.backend.execute(plan)):
                assert event.error is None
                self.tokens.setdefault(event.request_id, []).extend(event.token_ids)
                self.logprobs.setdefault(event.request_id, []).extend(event.logprobs or [])
                self.cached[event.request_id] = event.num_cached_tokens
        return self

    def close(self) -> None:
        self.backend.close()


def of(logits: Logits, name: str) -> dict[int, bytes]:
    return {position: digest for (request, position), digest in logits.items() if request == name}


def random_prompts(lengths: Sequence[int], vocab_size: int, seed: int = 3) -> dict[str, list[int]]:
    rng = random.Random(seed)
    return {f"len-{n}": [rng.randrange(vocab_size) for _ in range(n)] for n in lengths}


def quantised(model: LoadedModel, types: Sequence[str]) -> LoadedModel:
    """The model with its matrices quantised to ``types`` in turn (where the row length allows), by the gguf package."""
    import gguf

    weights: dict[str, WeightTensor] = {}
    count = 0
    for name, tensor in model.weights.items():
        if len(tensor.shape) == 2 and tensor.shape[1] % 32 == 0:
            kind = types[count % len(types)]
            count += 1
            data = gguf.quants.quantize(tensor.float32(), gguf.GGMLQuantizationType[kind.upper()])
            raw = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
            tensor = replace(tensor, dtype=kind, data=memoryview(raw).toreadonly(), add=0.0)
        weights[name] = tensor
    return replace(model, weights=weights)


def fixture_model(family: str) -> LoadedModel:
    from tests.backends.reference_runs import open_gguf_weights

    folder = Path(__file__).parents[1] / "fixtures" / "parity" / family
    return open_gguf_weights(next(folder.glob("*.gguf")))


def guesses_of(tokens: dict[str, list[int]], most: int, hit: float, vocab_size: int, seed: int = 1) -> Callable[[str, int], list[int]]:
    """Drafts of up to ``most`` tokens, each the one of a run before with probability ``hit``, else another."""
    rng = random.Random(seed)

    def guess(name: str, num_output: int) -> list[int]:
        coming = tokens[name][num_output : num_output + rng.randint(0, most)]
        return [token if rng.random() < hit else (token + 1) % vocab_size for token in coming]

    return guess
