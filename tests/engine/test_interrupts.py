"""Ctrl-C in the Python API: the step in progress is finished, the call ends, the engine goes on."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType

import pytest

from octavo import LLM, SamplingParams
from octavo.core.step import StepPlan
from octavo.engine.interrupts import interrupts_deferred
from octavo.engine.params import PreparedRequest
from tests.engine.scripted import bigram_engine, script

PARAMS = SamplingParams(temperature=0, max_tokens=8)


@pytest.fixture
def llm() -> Iterator[LLM]:
    engine = bigram_engine()
    script(engine, "x", ["a", "b", "c"])
    with LLM.from_engine(engine) as llm:
        yield llm


def interrupt_in_step(number: int) -> Callable[[StepPlan], None]:
    return lambda plan: signal.raise_signal(signal.SIGINT) if plan.step_index == number else None


@pytest.mark.parametrize("step", [0, 2])
def test_a_call_that_is_interrupted_leaves_a_working_engine(llm: LLM, step: int) -> None:
    llm.engine.backend.before_step = interrupt_in_step(step)
    with pytest.raises(KeyboardInterrupt):
        llm.generate("x", PARAMS)
    assert not llm.engine.has_work and llm.engine.scheduler.num_used_blocks == 0
    llm.engine.scheduler.check_invariants()
    assert llm.generate("x", PARAMS)[0].outputs[0].text == "abc"


@pytest.mark.parametrize("streamed", [False, True])
def test_an_interrupt_while_a_prompt_is_queued_leaves_no_request_behind(llm: LLM, monkeypatch: pytest.MonkeyPatch, streamed: bool) -> None:
    add = llm.engine.add

    def add_and_interrupt(prepared: PreparedRequest) -> None:
        add(prepared)
        if llm.engine.scheduler.stats.num_requests == 2 - streamed:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(llm.engine, "add", add_and_interrupt)
    with pytest.raises(KeyboardInterrupt):
        list(llm.stream("x", PARAMS)) if streamed else llm.generate(["x", "x", "x"], PARAMS)
    assert not llm.engine.has_work and not llm._inboxes
    assert llm.engine.scheduler.stats.num_aborted == 2 - streamed


def test_what_the_interrupted_step_gave_is_not_lost(llm: LLM) -> None:
    llm.engine.backend.before_step = interrupt_in_step(1)
    stream, parts = llm.stream("x", PARAMS), []
    with pytest.raises(KeyboardInterrupt):
        for event in stream:
            parts.append(event.text)
    assert parts == ["a"]
    assert llm.engine.scheduler.stats.num_output_tokens == 2


def test_the_handler_of_before_is_back_and_sees_the_signal_after_the_block() -> None:
    seen: list[str] = []

    def handler(_number: int, _frame: FrameType | None) -> None:
        seen.append("handled")

    old = signal.signal(signal.SIGINT, handler)
    try:
        with interrupts_deferred():
            signal.raise_signal(signal.SIGINT)
            seen.append("block ended")
        assert seen == ["block ended", "handled"] and signal.getsignal(signal.SIGINT) is handler
    finally:
        signal.signal(signal.SIGINT, old)


def test_other_threads_touch_no_handler() -> None:
    handlers: list[object] = []

    def run() -> None:
        with interrupts_deferred():
            handlers.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert handlers == [signal.getsignal(signal.SIGINT)]
