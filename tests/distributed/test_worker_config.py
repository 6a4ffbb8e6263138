"""What a worker makes of the cluster's configuration, and its process of errors: which are worth another try."""

from __future__ import annotations

import errno
from dataclasses import replace
from typing import cast

import pytest

from octavo.backends.base import BackendError, OutOfResources
from octavo.cli.worker import run as run_process
from octavo.config import ConfigError
from octavo.distributed.process_worker import HOPELESS
from octavo.distributed.worker import (
    WorkerOptions,
    WorkerServer,
    own_config,
)
from octavo.models.model_file import ModelFileError
from tests.engine.scripted import bigram_config


@pytest.mark.parametrize(
    ("error", "cause", "status"),
    [
        (ConfigError("num_kv_blocks: 7 is not allowed"), None, HOPELESS),
        (BackendError("num_kv_blocks: -1 is not allowed"), ValueError("-1"), HOPELESS),
        (OutOfResources("num_kv_blocks: 7 blocks cannot be allocated"), MemoryError(), 1),
        (OutOfResources("threads: 2 cannot be started"), RuntimeError("Resource temporarily unavailable"), 1),
        (ModelFileError("/m: cannot be read: No such file"), OSError(errno.ENOENT, "No such file"), HOPELESS),
        (ModelFileError("/m: cannot be read: Too many open files"), OSError(errno.EMFILE, "Too many open files"), 1),
        (ModelFileError("/m: cannot be read: Cannot allocate memory"), OSError(errno.ENOMEM, "Cannot allocate memory"), 1),
    ],
)
def test_what_only_lacks_memory_threads_or_files_is_tried_again(
    error: Exception, cause: Exception | None, status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """A worker that was killed for memory, say, comes up while that is still short."""

    class Lacking:
        async def run(self) -> None:
            raise error from cause

    assert run_process(cast(WorkerServer, Lacking())) == status
    assert capsys.readouterr().err == f"octavo worker: {error}\n"


def test_a_file_of_one_engine_alone_gets_the_workers_name_and_a_store_of_kv_is_everybodys() -> None:
    config = bigram_config()
    config = replace(config, cache=replace(config.cache, kv_disk_path="/d"), scheduler=replace(config.scheduler, record=None))
    own = own_config(config, WorkerOptions("w", threads=3, model="/m"))
    assert (own.cache.kv_disk_path, own.backend.threads, own.model.model) == ("/d", 3, "/m")
    recorded = own_config(replace(bigram_config(), scheduler=replace(config.scheduler, record="/r")), WorkerOptions("w"))
    assert recorded.scheduler.record == "/r.w"


@pytest.mark.parametrize(("blocks", "num_bytes"), [(48, None), (None, 1 << 20)])
def test_how_large_its_kv_pool_is_a_worker_knows_better(blocks: int | None, num_bytes: int | None) -> None:
    """In whichever way the front end says it, for its own host."""
    config = bigram_config()
    for cache in (replace(config.cache, num_kv_blocks=9), replace(config.cache, num_kv_blocks=None, kv_cache_memory=9)):
        own = own_config(replace(config, cache=cache), WorkerOptions("w", num_kv_blocks=blocks, kv_cache_memory=num_bytes)).cache
        assert (own.num_kv_blocks, own.kv_cache_memory) == (blocks, num_bytes)
        assert own_config(replace(config, cache=cache), WorkerOptions("w")).cache == cache
