"""Who may join, and what happens to a rolling restart whose new workers may not: what differs is named, and the old ones serve on."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import msgspec
import pytest
from click import ClickException

from octavo.bench.stub_worker import StubWorker
from octavo.cli.cluster import _has_restarted, status_lines
from octavo.distributed.fingerprints import misfit
from octavo.distributed.messages import Events, Ready, Refuse, ToWorker, Welcome
from tests.distributed.test_front_end import Launcher, engine_of
from tests.distributed.test_stub_worker import SECRET, TOKENIZER, expected, front_end, open_stream, read, stub, until


def test_equal_fingerprints_fit() -> None:
    assert misfit("m", "a/a:f32:kv-bf16:avx2", "a", None) is None
    assert misfit("m", "a/a:f32:kv-bf16:avx2", "a", "a/a:f32:kv-bf16:avx2") is None


@pytest.mark.parametrize("fingerprint", ["b/b:f32", "ab/b:f32", "a", ""])
def test_another_model_is_named_with_both_fingerprints(fingerprint: str) -> None:
    found = misfit("m.gguf", fingerprint, "a", None)
    assert found is not None and "its model 'm.gguf' is another" in found
    assert f"its fingerprint is {fingerprint.partition('/')[0]}; this front end's has a. " in found


def test_what_a_backend_does_otherwise_is_named_and_nothing_else() -> None:
    found = misfit("m", "a/a:f32:kv-int8:layout-3:avx2:pages-1+2", "a", "a/a:f32:kv-bf16:layout-3:avx512")
    expected = "with kv-int8 where they have kv-bf16, avx2 where they have avx512, pages-1+2 where they have nothing: "
    assert found is not None and expected in found
    assert "f32" not in found and "layout" not in found


def test_a_restart_whose_new_workers_do_not_fit_stops_and_the_old_ones_serve_on() -> None:
    """As when the model's file was replaced meanwhile. When it is as it was, the next restart brings all of them."""

    async def run() -> None:
        launcher = Launcher("a", "b")
        engine = engine_of(launcher)
        engine.start()
        await launcher.opened.wait()
        (first, first_task), (second, second_task) = stub(engine, "a"), stub(engine, "b")
        await engine.ready()
        streams = [open_stream(engine, i, 4) for i in range(6)]
        await until(lambda: first.num_attempts and first.num_attempts + second.num_attempts == 6)
        await engine.cluster.restart()
        for worker in (first, second):
            worker.give(4)
        assert [await read(stream) for stream in streams] == [expected(i, 4) for i in range(6)]
        await asyncio.wait_for(first_task, 60)  # drained, and told to end
        await until(lambda: launcher.replaced == ["a"])
        other = StubWorker("a", "another model", TOKENIZER.vocab_size)
        await asyncio.wait_for(other.run(engine.control.address, SECRET), 60)  # refused
        launcher.trouble = "worker a cannot run; its message is above"
        await until(lambda: engine.cluster.status()["restart"] is None)
        status = engine.cluster.status()
        why = "the restart has ended early, after 0 of 2 workers: worker a: its model 'stub' is another: its fingerprint is another model; "
        assert status["restart_error"].startswith(f"{why}this front end's has bigram")
        assert status_lines(status)[-1] == status["restart_error"]
        with pytest.raises(ClickException, match="ended early, after 0 of 2"):
            _has_restarted(status)
        assert [link.name for link in engine.open_links()] == ["b"] and engine.health().ready
        stream = open_stream(engine, 7, 4)
        await until(lambda: second.num_attempts == 1)
        second.give(4)
        assert await read(stream) == expected(7, 4)

        await engine.cluster.restart()  # "a" is not waited for: it is tried again
        await until(lambda: launcher.replaced == ["a", "a"])
        launcher.trouble = None
        _, again = stub(engine, "a")
        await until(lambda: engine.cluster.status()["restart"] == {"done": 1, "of": 2})
        await asyncio.wait_for(second_task, 60)
        await until(lambda: launcher.replaced == ["a", "a", "b"])
        _, last = stub(engine, "b")
        await until(lambda: engine.cluster.status()["restart"] is None)
        status = engine.cluster.status()
        assert status["restart_error"] is None and _has_restarted(status)
        assert {link.name for link in engine.open_links()} == {"a", "b"}
        await engine.stop()
        await asyncio.gather(again, last)

    asyncio.run(run())


@dataclass
class Other(StubWorker):
    """Computes otherwise than stubs do. ``refusals``: final ones, and others."""

    refusals: list[bool] = field(default_factory=list)

    def _ready(self, welcome: Welcome) -> Ready:
        return msgspec.structs.replace(super()._ready(welcome), fingerprint=f"{self.model_fingerprint}/other")

    def _take(self, messages: list[ToWorker]) -> None:
        self.refusals += [message.is_final for message in messages if isinstance(message, Refuse)]
        super()._take(messages)


def test_when_all_workers_are_gone_others_may_take_their_place_once_no_answer_is_begun() -> None:
    """As when every host is upgraded at a time: nobody is kept out for what nobody is there to differ from."""

    async def run() -> None:
        engine = await front_end()
        first, task = stub(engine, "a")
        await until(lambda: len(engine.open_links()) == 1)
        other = Other("b", "bigram", TOKENIZER.vocab_size)

        async def comes() -> None:
            await asyncio.wait_for(other.run(engine.control.address, SECRET), 60)

        await comes()
        assert other.refusals == [True] and "with other where they have stub" in engine.control.last_words["b"]
        begun, waiting = open_stream(engine, 0, 4), open_stream(engine, 1, 4)
        await until(lambda: first.num_attempts == 2)
        events = first._events(first._attempts[min(first._attempts)], 2)  # of one of them
        first._channel.send(Events(events))  # type: ignore[union-attr]
        await until(engine.is_amid_answers)
        task.cancel()
        await until(lambda: not engine.open_links())
        await comes()
        assert other.refusals == [True, False], "it may come again"
        engine.abort(begun)
        assert len(engine.flights) == 1 and not engine.is_amid_answers()
        again = asyncio.create_task(other.run(engine.control.address, SECRET))
        await until(lambda: other.num_attempts == 1)
        assert engine.fingerprint == "other" and other.refusals == [True, False]
        other.give(4)
        assert await read(waiting) == expected(1, 4)
        await asyncio.wait_for(first.run(engine.control.address, SECRET), 60)
        assert "with stub where they have other" in engine.control.last_words["a"]
        stream = open_stream(engine, 2, 4)
        await until(lambda: other.num_attempts == 1)
        other.give(4)
        assert await read(stream) == expected(2, 4)
        await engine.stop()
        await again

    asyncio.run(run())
