"""The load generator against Octavo's own server, on the scripted model: what it reports is what the server did."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from octavo.bench.latency import Goodput
from octavo.bench.serve import ServeCase, Target, run_serve
from octavo.bench.spike import Spike
from octavo.core.step import StepPlan
from octavo.server.app import ServerOptions
from octavo.workload.arrivals import ClosedLoop, OpenLoop
from octavo.workload.lengths import Fixed, Uniform
from octavo.workload.requests import Independent, SharedPrefix, TokenRange, Workload
from tests.engine.scripted import bigram_engine
from tests.server.harness import RunningServer, wait_until

TOKENS = TokenRange(3, 259)  # the single bytes of the scripted model
LOAD = Workload(ClosedLoop(4), Independent(Uniform(5, 40), Uniform(2, 30)), 24, None, TOKENS)
CASE = ServeCase(LOAD, {"load": "a load", "ignore_eos": True})


@pytest.fixture
def server() -> Iterator[RunningServer]:
    with RunningServer(bigram_engine(max_num_seqs=8), ServerOptions(api_key="secret")) as running:
        yield running
        wait_until(running.is_idle)


def target(server: RunningServer) -> Target:
    return Target(f"http://127.0.0.1:{server.port}/v1", None, "secret", 60.0)


def test_figures_are_what_the_server_did(server: RunningServer) -> None:
    record = run_serve(target(server), replace(CASE, goodput=Goodput.parse("ttft:60000,itl:60000,tpot:60000,e2e:60000")))
    requests = list(LOAD.requests())
    assert record["model"] == "m" and record["num_completed"] == 24 and record["errors"] == {}
    assert record["num_output_tokens"] == sum(r.num_output for r in requests) and record["num_short"] == 0
    assert record["num_prompt_tokens"] == sum(len(r.prompt_token_ids) for r in requests)
    assert record["goodput"]["share"] == 1.0
    for name in ("ttft_ms", "itl_ms", "tpot_ms", "e2e_ms"):
        figures = record[name]
        assert 0 <= figures["p50"] <= figures["p90"] <= figures["p95"] <= figures["p99"] <= figures["max"]
    assert record["ttft_ms"]["max"] <= record["e2e_ms"]["max"] <= 1000 * record["wall_s"] + 0.01
    rounding_s = 0.0006
    slowest, fastest = (record["num_output_tokens"] / (record["wall_s"] + error_s) for error_s in (rounding_s, -rounding_s))
    assert slowest < record["output_tok_s"] < fastest


def test_streams_of_one_step_are_served_together(server: RunningServer) -> None:
    record = run_serve(target(server), replace(CASE, load=replace(LOAD, arrivals=OpenLoop(500.0))))
    assert record["num_completed"] == 24
    engine = server.engine
    assert engine.metrics.num_prompt_tokens >= record["num_prompt_tokens"]


def test_a_shared_prefix_is_found_in_the_cache(server: RunningServer) -> None:
    load = replace(LOAD, prefix=SharedPrefix(64, 1), arrivals=ClosedLoop(1))
    record = run_serve(target(server), replace(CASE, load=load))
    assert record["num_cached_tokens"] >= 23 * 64  # all but the first request's


def test_a_spike(server: RunningServer) -> None:
    spike = Spike(num_streams=3, stream_output=400, long_prompt=600, tokens=TOKENS)
    server.engine.backend.delay_s = 0.001  # type: ignore[attr-defined]
    record = run_serve(target(server), ServeCase(spike, {"load": "spike", "ignore_eos": True}, num_warmup=0))
    assert record["num_completed"] == 3 and record["num_prompt_tokens"] == 3 * 64 and record["num_output_tokens"] == 3 * 400
    assert record["spike"]["prompt_ttft_ms"] > 0


def test_a_wrong_key_is_an_error(server: RunningServer) -> None:
    with pytest.raises(RuntimeError, match="cannot be measured: http_401: "):
        run_serve(replace(target(server), api_key="wrong"), CASE)


def test_a_server_that_fails_in_the_middle_is_counted_by_kind(server: RunningServer) -> None:
    """A step fails when four streams have tokens: they end with an error event, and the run goes on."""
    failed = False

    def fail_once(plan: StepPlan) -> None:
        nonlocal failed
        if not failed and len(plan.slices) == 4 and all(piece.start > 5 for piece in plan.slices):
            failed = True
            raise RuntimeError("no more")

    server.engine.backend.before_step = fail_once  # type: ignore[attr-defined]
    server.engine.backend.delay_s = 0.002  # type: ignore[attr-defined]  # so that four run together, however slowly this client sends
    load = replace(LOAD, lengths=Independent(Fixed(5), Fixed(200)))
    record = run_serve(target(server), replace(CASE, load=load, num_warmup=0))
    assert record["errors"] == {"stream_error": 4} and record["num_completed"] == 20
    assert "no more" in record["first_error"]
