"""A front end in this process with workers of a real tiny model in processes of their own, by role: as `octavo serve --workers`."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import tempfile
from collections.abc import AsyncIterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from octavo.distributed.autoscale import ScaleLimits
from octavo.distributed.channel import Address
from octavo.distributed.cluster_engine import ClusterEngine
from octavo.distributed.cluster_options import ClusterOptions, HandoverOptions
from octavo.distributed.handshake import new_secret
from octavo.distributed.local_cluster import worker_names
from octavo.distributed.process_worker import LocalProcesses
from octavo.engine.llm import make_config
from octavo.models.loading import open_model
from tests.distributed.clusters import PATIENT, WAIT_S, Cluster, children_find_the_sources
from tests.distributed.pair import LIMITS

SIZES = {"num_kv_blocks": 1200, "max_num_seqs": 8, "max_num_batched_tokens": 64}
HANDOVER = HandoverOptions(min_layerwise=64, may_borrow=False, limits=LIMITS)  # however long prompts take here, their workers have them


@contextlib.asynccontextmanager
async def kv_cluster(
    path: Path,
    workers: dict[str, int],
    handover: HandoverOptions | None = None,
    scale: Mapping[str, ScaleLimits] | None = None,
    **config: Any,
) -> AsyncIterator[Cluster]:
    """Workers that are ready. No edge of a hand-off ends for lack of time while a test waits, so what a test sees is none's doing."""
    secret, folder = new_secret(), tempfile.mkdtemp(prefix="octavo-test-")
    processes = LocalProcesses(worker_names(workers), secret, 1)
    options = ClusterOptions(liveness=PATIENT, handover=handover or HANDOVER, scale=scale or {}, worker_wait_s=600.0)
    settings = make_config(str(path), **{**SIZES, **config})
    address, clean_up = Address(path=f"{folder}/workers"), partial(shutil.rmtree, folder, ignore_errors=True)
    engine = ClusterEngine(open_model(path).read_text(), settings, address, secret.encode(), options, processes, clean_up)
    with children_find_the_sources():
        engine.start()
        try:
            async with asyncio.timeout(WAIT_S):
                await engine.ready()
            yield Cluster(engine, processes)
            engine.flights.check_invariants()
            engine.handovers.check_invariants()
        finally:
            for pid in processes.pids.values():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)
            await engine.stop()


def is_empty(cluster: Cluster) -> bool:
    """Every worker has said that nothing of it is taken."""
    return all(
        not (load.num_used_blocks or load.num_running or load.num_waiting or load.num_offered or load.num_reserved)
        for load in (link.load for link in cluster.engine.control)
    )
