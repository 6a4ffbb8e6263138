"""`octavo bench advice`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import click

from octavo.cli.options import Finite, engine_config, engine_options, model_options, refuse_given
from octavo.cli.progress import fetched


@click.command(short_help="Replayed advice against the switches really thrown.")
@model_options
@click.option("--cluster", "in_cluster", is_flag=True, help="Switches of a cluster of two workers on this host, a thread each.")
@click.option("--num-requests", type=click.IntRange(20, 500), default=80, show_default=True, help="Of each run.")
@click.option("--load", type=Finite(0.1, 2.0), default=0.85, show_default=True, help="Of capacity, where requests arrive by a rate.")
@click.option("--repeat", type=click.IntRange(1), default=2, show_default=True, help="Runs without and with each switch.")
@click.option("--seed", type=int, default=0, show_default=True, help="The same seed makes the same requests.")
@click.option("--switch", "switches", multiple=True, help="Only these cases (default: all).")
@click.option("--json", "as_json", is_flag=True, help="Print only the JSON record.")
@engine_options
def advice(**options: Any) -> None:
    """Replayed advice against the switches really thrown.

    For each of seven switches, and one that gains nothing: a load on an engine that lacks it, what a replay of that run says it would
    gain, and what it gains. The cases: places, pool, kv_dtype, policy, chunk, prefix_cache, salt, nothing. With --cluster four switches of
    a cluster, and one that gains nothing: router, more, apart, together, nothing. The last line is a JSON record.
    """
    config = engine_config(options)
    if options["in_cluster"]:
        refuse_given(("load",), "it does nothing with --cluster, where clients wait for their answers")
    from octavo.bench.advice import AdviceCase, Trial, run_advice
    from octavo.bench.advice_cluster import CLUSTER_KINDS, cluster_trials
    from octavo.bench.advice_engine import KINDS, engine_trials
    from octavo.cli.what_if import replay_window
    from octavo.engine.event_stream import EngineUnavailable
    from octavo.engine.replay_advice import ReplayError

    kinds, known = options["switches"], CLUSTER_KINDS if options["in_cluster"] else KINDS
    for kind in kinds:
        if kind not in known:
            raise click.BadParameter(f"{kind!r} is not allowed; one of {', '.join(known)}", param_hint="'--switch'")
    case = AdviceCase(options["num_requests"], options["load"], options["repeat"], options["seed"], tuple(kinds))
    named = fetched(config)
    trials: Sequence[Trial] = cluster_trials(named, case) if options["in_cluster"] else engine_trials(named, case)
    about = {"model": config.model.model} | ({"cluster": True} if options["in_cluster"] else {"load": case.load})
    try:
        run_advice(trials, about, case, replay_window, click.echo, options["as_json"])
    except (EngineUnavailable, ReplayError) as error:
        raise click.ClickException(str(error)) from None
