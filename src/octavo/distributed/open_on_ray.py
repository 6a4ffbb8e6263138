"""From the description of a cluster to an engine whose workers Ray places. Ray itself is imported only here, and only when it is wanted."""

from __future__ import annotations

from collections.abc import Callable

from octavo.config import EngineConfig
from octavo.distributed.channel import Address
from octavo.distributed.cluster_engine import ClusterEngine
from octavo.distributed.cluster_file import ClusterFile, Ray
from octavo.distributed.cluster_options import ClusterOptions
from octavo.distributed.handshake import new_secret, read_secret
from octavo.distributed.local_cluster import shared_config


class MissingExtra(RuntimeError):
    """A package is needed that an extra of this one brings; the message names both."""


def open_on_ray(
    config: EngineConfig, path: str, cluster: ClusterFile, options: ClusterOptions, beside: Callable[[], object] | None = None
) -> ClusterEngine:
    """An engine that has only to be started. ``config``: what workers run, its model named as they are to find it; ``path``: where the
    model is on this host, of which the text alone is read. ``beside`` is called meanwhile. Ray is left, or ended, when the engine stops.

    Raises MissingExtra, RayUnavailable, ConfigError, ModelFileError, SecretError; its ``ready`` PlacingError.
    """
    from octavo.models.loading import load_model

    config.validate()
    secret = new_secret().encode() if cluster.secret_file is None else read_secret(str(cluster.secret_file))
    try:
        from octavo.distributed.ray_cluster import RayLauncher, connect_ray, disconnect_ray, own_address
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "ray":
            raise
        raise MissingExtra("Ray is not installed; `pip install 'octavo[ray]'` brings it") from None
    model = load_model(path)
    if beside is not None:
        beside()
    most = options.most_workers(cluster.workers)
    if connect_ray((cluster.ray or Ray()).address):
        config = shared_config(config, most)  # all of them are on this machine
    try:
        address = Address(cluster.control_host or own_address(), cluster.control_port)
        launcher = RayLauncher(cluster.groups, secret, config.backend.threads, most=most)
        is_told = cluster.control_host is not None or cluster.secret_file is not None  # others can know where to come, and the secret
        return ClusterEngine(model, config, address, secret, options, launcher, disconnect_ray, is_told)
    except BaseException:
        disconnect_ray()
        raise
