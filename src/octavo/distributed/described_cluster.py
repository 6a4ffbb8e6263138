"""From the description of a cluster to its engine: workers on Ray where it says so, else processes of this host.

Ray is imported here alone, and only when it is wanted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

from octavo.config import EngineConfig
from octavo.distributed.channel import Address
from octavo.distributed.cluster_engine import ClusterEngine
from octavo.distributed.cluster_file import ClusterFile
from octavo.distributed.cluster_options import ClusterOptions
from octavo.distributed.handshake import new_secret, read_secret
from octavo.distributed.local_cluster import ClusterPlan, open_cluster, shared_config


class MissingExtra(RuntimeError):
    """A package is needed that an extra of this one brings; the message names both."""


def open_described(
    config: EngineConfig, path: str, cluster: ClusterFile, options: ClusterOptions, beside: Callable[[], object] | None = None
) -> ClusterEngine:
    """An engine that has only to be started. ``config``: what workers run, its model named as they are to find it; ``path``: where the
    model is on this host, of which the text alone is read. ``beside`` is called meanwhile.

    Raises ConfigError, ModelFileError, SecretError; MissingExtra and RayUnavailable for Ray.
    """
    if cluster.ray is not None:
        return _open_on_ray(config, path, cluster, options, beside)
    roles: Counter[str] = Counter()
    for group in cluster.groups:
        roles[group.role] += group.number
    threads = cluster.groups[0].cpus
    if threads is not None:
        config = replace(config, backend=replace(config.backend, threads=threads))
    listen = None if cluster.control_host is None else Address(cluster.control_host, cluster.control_port)
    secret_file = None if cluster.secret_file is None else str(cluster.secret_file)
    return open_cluster(config, path, ClusterPlan(roles, listen, secret_file, options), beside)


def _open_on_ray(
    config: EngineConfig, path: str, cluster: ClusterFile, options: ClusterOptions, beside: Callable[[], object] | None
) -> ClusterEngine:
    from octavo.models.loading import load_model

    config.validate()
    secret = new_secret().encode() if cluster.secret_file is None else read_secret(str(cluster.secret_file))
    model = load_model(path)
    if beside is not None:
        beside()
    try:
        from octavo.distributed.ray_cluster import RayLauncher, connect_ray, disconnect_ray, own_address
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "ray":
            raise
        raise MissingExtra("Ray is not installed; `pip install 'octavo[ray]'` brings it") from None
    assert cluster.ray is not None
    if connect_ray(cluster.ray.address):
        config = shared_config(config, cluster.num_workers)  # all of them are on this machine
    address = Address(cluster.control_host or own_address(), cluster.control_port)
    launcher = RayLauncher(cluster.groups, secret)
    return ClusterEngine(model, config, address, secret, options, launcher, disconnect_ray)
