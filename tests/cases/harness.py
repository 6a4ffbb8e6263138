"""The engine on the cpu backend with a tiny random model, stepped by hand, and the plain run that everything is compared with.

The plain run of a request: alone, no prefix cache, its prompt in one chunk, a large KV pool, one thread. "Equal" is down to the bits of
log-probabilities.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from octavo.core.request import SamplingParams
from octavo.engine.engine import Engine
from octavo.engine.llm import make_config
from octavo.engine.outputs import OutputEvent, RequestOutput

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=2)
Answer = tuple[list[int], str, str | None, object, str]  # token ids, text, finish reason, stop reason, log-probabilities as written


@contextmanager
def open_engine(path: Path, **options: Any) -> Iterator[Engine]:
    """Options are those of EngineConfig's sections. At the end every block is back and the books agree."""
    engine = Engine.load(make_config(str(path), **{"num_kv_blocks": 256, "threads": 2, **options}))
    try:
        yield engine
        engine.scheduler.check_invariants()
        assert engine.scheduler.num_used_blocks == 0 and not engine.has_work
        assert engine.scheduler.num_free_blocks + engine.scheduler.num_cached_blocks == engine.scheduler.num_blocks
    finally:
        engine.close()


@contextmanager
def open_plain(path: Path, **options: Any) -> Iterator[Engine]:
    with open_engine(path, enable_prefix_caching=False, max_num_batched_tokens=1024, threads=1, **options) as engine:
        yield engine


@dataclass
class Job:
    """One request and what came of it: its events in order, and the output they add up to."""

    prompt_ids: list[int]
    params: SamplingParams
    salt: str | None = None
    output: RequestOutput | None = None
    events: list[OutputEvent] = field(default_factory=list)

    def answer(self, choice: int = 0) -> Answer:
        assert self.output is not None and self.output.error is None
        o = self.output.outputs[choice]
        return o.token_ids, o.text, o.finish_reason, o.stop_reason, repr(o.logprobs)

    @property
    def num_cached(self) -> int:
        assert self.output is not None
        return self.output.num_cached_tokens

    @property
    def num_tokens(self) -> int:
        assert self.output is not None
        return sum(len(o.token_ids) for o in self.output.outputs)


def submit(engine: Engine, job: Job) -> str:
    """Queue a job; returns its request id."""
    prepared = engine.prepare(list(job.prompt_ids), job.params, cache_salt=job.salt)
    engine.add(prepared)
    job.output = RequestOutput.start(prepared.request, None, prepared.warnings)
    return prepared.request.request_id


def run(engine: Engine, *jobs: Job, after_step: Callable[[int], None] | None = None) -> None:
    """Queue all jobs and step until nothing is left. Every choice must end exactly once, and nothing come after its end."""
    by_id = {submit(engine, job): job for job in jobs}
    step = 0
    while engine.has_work:
        for event in engine.step():
            take(by_id[event.request_id], event)
        step += 1
        assert step < 100_000
        if after_step is not None:
            after_step(step)
    assert all(job.output is not None and job.output.finished for job in jobs)


def take(job: Job, event: OutputEvent) -> None:
    assert job.output is not None and job.output.outputs[event.choice].finish_reason is None, "an event after the end"
    job.events.append(event)
    job.output.apply(event)


def plain_answer(engine: Engine, job: Job, **change: Any) -> Answer:
    """What the same request gives on a plain engine, perhaps with changed parameters."""
    alone = Job(job.prompt_ids, replace(job.params, **change))
    run(engine, alone)
    return alone.answer()


def prompt_of(num_tokens: int, salt: int = 0) -> list[int]:
    return [5 + (i * i + 7 * i + 13 * salt) % 480 for i in range(num_tokens)]


def jobs_of(prompts: Sequence[list[int]], params: SamplingParams = GREEDY) -> list[Job]:
    return [Job(prompt, params) for prompt in prompts]
