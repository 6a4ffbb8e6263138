"""`octavo serve`: the OpenAI-compatible server."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from octavo.cli.cluster_flags import cluster_options, engine_opener
from octavo.cli.options import ByteSize, Finite, engine_config, engine_options, model_options
from octavo.cli.progress import fetched

if TYPE_CHECKING:
    from octavo.config import EngineConfig
    from octavo.core.recorded_window import WindowReplay
    from octavo.distributed.cluster_file import ClusterFile
    from octavo.engine.replay_advice import Window
    from octavo.engine.serving import ServingEngine


@click.command()
@model_options
@click.option("--served-model-name", help="Name of the model in requests and answers (default: --model as given; of a path, its stem).")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on; 0.0.0.0 for all of IPv4, :: for IPv6.")
@click.option("--port", type=click.IntRange(0, 65535), default=8000, show_default=True, help="0 takes a free port.")
@click.option("--api-key", envvar="OCTAVO_API_KEY", help="Requests must carry it as a bearer token (also $OCTAVO_API_KEY).")
@click.option("--max-body-size", type=ByteSize(), default="32MiB", show_default=True, help="Largest request body.")
@click.option("--drain-s", type=Finite(0), default=30.0, show_default=True, help="Seconds running requests get at shutdown.")
@click.option("--explain-cache", is_flag=True, help="Usage says where and why a prompt left the prefix cache; shows others' tokens.")
@cluster_options
@engine_options
def serve(**options: Any) -> None:
    """Serve a model over an OpenAI-compatible API."""
    serve_with(options)


def serve_with(options: dict[str, Any], described: ClusterFile | None = None) -> None:
    """What `octavo serve` does with its flags. ``described``: see ``engine_opener``."""
    if options["api_key"] is not None and not options["api_key"].strip():
        raise click.BadParameter("the key is empty; leave the flag out to serve without one", param_hint="'--api-key'")
    name = name_of(options["model"]) if options["served_model_name"] is None else options["served_model_name"]
    config = engine_config({**options, "served_model_name": name})
    opener = engine_opener(options, described)
    from octavo.server.launch import load_in_process, run_server
    from octavo.server.options import ServerOptions

    server_options = ServerOptions(
        api_key=options["api_key"],
        max_body_bytes=options["max_body_size"],
        drain_s=options["drain_s"],
        explain_cache=options["explain_cache"],
    )
    local = fetched(config)

    def load(_: EngineConfig, beside: Callable[[], object]) -> ServingEngine:
        assert opener is not None
        return opener(config, local.model.model, beside)  # workers elsewhere find the model by its own name

    run_server(local, options["host"], options["port"], server_options, _replay, load_in_process if opener is None else load)


def _replay(window: Window) -> WindowReplay:
    """Nothing of it is loaded before somebody asks."""
    from octavo.cli.what_if import replay_window

    return replay_window(window)


def name_of(spec: str) -> str | None:
    """The name to serve ``spec`` under: catalogue names and hub specs as they are; None for a path, which names itself."""
    from octavo.models.catalog import CATALOG

    return spec if spec in CATALOG or spec.startswith("hf:") else None
