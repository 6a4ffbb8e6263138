"""A front end's engine with workers on this host: from a configuration to a ``ClusterEngine`` that has only to be started.

Owns how this host's memory and cores are shared among them, and the socket that they connect to.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from octavo.config import ConfigError, EngineConfig
from octavo.distributed.channel import Address
from octavo.distributed.cluster_engine import ClusterEngine
from octavo.distributed.cluster_options import ClusterOptions, worker_name
from octavo.distributed.handshake import new_secret, read_secret
from octavo.distributed.process_worker import LocalProcesses, share_of_cores
from octavo.distributed.unix_sockets import is_left
from octavo.engine.engine import default_kv_bytes

FOLDER = "octavo-"  # of a front end's own, in the one for temporary files
SOCKET = "workers"
_IS_OURS = re.compile(rf"{FOLDER}[a-z0-9_]{{8}}")  # what mkdtemp makes of it


@dataclass(frozen=True, slots=True)
class ClusterPlan:
    """``workers``: processes of this host to start, by role; may be none. ``listen``: where workers connect to (None: a socket that only
    this user of this host can reach). ``secret_file``: see ``read_secret`` (None: $OCTAVO_CLUSTER_SECRET, else, where all workers are
    started from here, a new one)."""

    workers: Mapping[str, int]
    listen: Address | None = None
    secret_file: str | None = None
    options: ClusterOptions = field(default_factory=ClusterOptions)


def worker_names(workers: Mapping[str, int]) -> dict[str, str]:
    """Roles by name: worker-0, worker-1, ..., or prefill-0, decode-0, ..."""
    return {worker_name(role, i): role for role, number in workers.items() for i in range(number)}


def shared_config(config: EngineConfig, num_workers: int) -> EngineConfig:
    """What each of so many workers on this host runs: of memory that nobody gave out, each gets its share."""
    cache = config.cache
    if cache.num_kv_blocks is None and cache.kv_cache_memory is None and num_workers > 1:
        config = replace(config, cache=replace(cache, kv_cache_memory=max(1, default_kv_bytes() // num_workers)))
    return config


def sweep_folders(parent: Path, min_age_s: float = 60.0) -> None:
    """Remove what front ends that were killed have left in ``parent``: folders of this user, named as ``mkdtemp`` does, with nothing in
    them but a socket at which nobody listens, if that. Younger ones may be about to listen."""
    for folder in parent.glob(f"{FOLDER}*"):
        path = folder / SOCKET
        with contextlib.suppress(OSError):
            is_empty = _IS_OURS.fullmatch(folder.name) is not None and not os.listdir(folder)
            found = (folder if is_empty else path).lstat()
            if found.st_uid != os.getuid() or time.time() - found.st_mtime < min_age_s or not (is_empty or is_left(str(path))):
                continue
            if not is_empty:
                path.unlink()
            folder.rmdir()


def open_cluster(config: EngineConfig, path: str, plan: ClusterPlan, beside: Callable[[], object] | None = None) -> ClusterEngine:
    """An engine whose workers run ``config``; ``path``: where its model is on this host, of which the text alone is read. ``beside`` is
    called meanwhile. Raises ConfigError, ModelFileError, SecretError."""
    from octavo.models.loading import open_model

    config.validate()
    names = worker_names(plan.workers)
    if not names and plan.listen is None:
        raise ConfigError("workers: 0 is not allowed; without an address to listen at there is nobody to wait for")
    is_ours = plan.listen is None and plan.secret_file is None
    secret = new_secret().encode() if is_ours else read_secret(plan.secret_file)
    model = open_model(path).read_text()
    if beside is not None:
        beside()
    sweep_folders(Path(tempfile.gettempdir()))
    most = plan.options.most_workers(plan.workers)
    threads = config.backend.threads or share_of_cores(most) if names else None
    launcher = LocalProcesses(names, secret.decode(), threads) if names else None
    shared = shared_config(config, most) if names else config
    if plan.listen is not None:
        return ClusterEngine(model, shared, plan.listen, secret, plan.options, launcher)
    folder = tempfile.mkdtemp(prefix=FOLDER)  # that nobody else may enter
    clean_up, address = partial(shutil.rmtree, folder, ignore_errors=True), Address(path=str(Path(folder) / SOCKET))
    try:
        return ClusterEngine(model, shared, address, secret, plan.options, launcher, clean_up, others_may_join=False)
    except BaseException:
        clean_up()
        raise
