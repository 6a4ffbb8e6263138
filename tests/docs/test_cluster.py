"""docs/cluster.md and the code say the same of what is told of workers."""

from __future__ import annotations

import asyncio
import re

from octavo.distributed.channel import Address
from octavo.distributed.cluster_engine import ClusterEngine
from octavo.distributed.journeys import Journeys
from octavo.distributed.link import Link
from octavo.distributed.messages import Load, Ready, WorkerLimits
from tests.docs.pages import page, section
from tests.engine.scripted import bigram_config, bigram_model, byte_tokenizer

OPERATIONS = section(page("docs/cluster.md"), "Operations")
TOLD = set(re.findall(r"`(\w+)`", OPERATIONS))


def test_what_is_told_of_workers() -> None:
    async def run() -> None:
        engine = ClusterEngine(bigram_model(byte_tokenizer()), bigram_config(), Address("127.0.0.1", 0), b"a secret of the tests")
        worker = engine.control.fleet.hello("w0", "both", "here", 1, "boot", 0.0)
        link = Link(None, worker, ready=Ready("m", "f", WorkerLimits(1, 1, 1, 1, 1, 1, 1)), load=Load())  # type: ignore[arg-type]
        engine.control._links["w0"] = link
        status = engine.cluster.status()
        (entry,) = status["workers"]
        assert {*status, *entry, *entry["load"]} - {"workers"} <= TOLD

    asyncio.run(run())


def test_metrics_of_the_front_end() -> None:
    names = {family.name + ("_total" if family.kind == "counter" else "") for family in Journeys().families()}
    assert names <= TOLD
