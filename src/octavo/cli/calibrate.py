"""`octavo calibrate`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from octavo.cli.options import Finite, checked, engine_config, engine_options, model_options
from octavo.cli.progress import fetched, progress_line
from octavo.core.words import counted

if TYPE_CHECKING:
    from octavo.costs.coefficients import Coefficients
    from octavo.engine.engine import Engine

_OUT_HELP = "Write the cost there, and not where engines look for it."


@click.command(short_help="Measure what steps take here, for the engine and the simulator.")
@model_options
@click.option("--seconds", "budget_s", type=Finite(0.1, 3600), default=60.0, show_default=True, help="Time to measure for.")
@click.option("--out", "out_file", type=click.Path(dir_okay=False), help=_OUT_HELP)
@click.option("--json", "as_json", is_flag=True, help="Print only the JSON record.")
@engine_options
def calibrate(budget_s: float, out_file: str | None, as_json: bool, **options: Any) -> None:
    """Measure what steps take here, for the engine and the simulator.

    Short scenes of requests run as a server runs them; a cost of steps is fitted on four of five, and its error stated on the fifth.
    Engines that start with the same model, types, kernels and number of threads begin with it; `octavo simulate --fitted` takes the file.
    Let nothing else run meanwhile. The last line printed is a JSON record.
    """
    config = engine_config(options)
    from octavo.engine.calibrate import calibrate as measure
    from octavo.engine.engine import Engine
    from octavo.engine.step_costs import write_cost
    from octavo.engine.user_files import check_writable

    if out_file is not None:
        checked("out", lambda: check_writable(out_file))  # before anything is loaded, let alone measured
    engine = Engine.load(fetched(config))
    path = _own_file(engine) if out_file is None else Path(out_file)
    with progress_line("calibrating") as progress:
        cost = measure(engine, budget_s, progress)
    write_cost(cost, path)
    if not as_json:
        click.echo(shown(cost))
        click.echo(f"written to {path}")
    click.echo(json.dumps({"calibrate": str(path), **_rounded(json.loads(cost.to_json()))}))


def _own_file(engine: Engine) -> Path:
    """Where engines like this one look for the cost, if it can be written."""
    from octavo.engine.step_costs import cost_file, fitted_for
    from octavo.engine.user_files import check_writable

    key = fitted_for(engine.backend)
    if key is None:
        raise click.UsageError(f"--out is needed: engines look for no cost of the {engine.config.backend.backend} backend")
    path = cost_file(key)
    path.parent.mkdir(parents=True, exist_ok=True)
    check_writable(path)
    return path


def shown(cost: Coefficients) -> str:
    """The cost of a few typical steps, and the errors on steps that were held out."""
    from octavo.bench.tables import table
    from octavo.core.cost import StepShape

    def step(*slices: tuple[int, int, int]) -> str:
        shape = StepShape()
        for start, num_rows, num_logits in slices:
            shape.add(start, num_rows, num_logits)
        return f"{1000 * cost.seconds_of(shape):.2f}"

    batches = [["decode, ms", "behind 0", "behind 1000"]]
    batches += [[f"{n} at once", step(*[(0, 1, 1)] * n), step(*[(1000, 1, 1)] * n)] for n in (1, 4, 16, 64)]
    prompts = [["prompt, ms", "alone", "beside 16"]]
    prompts += [[f"{n} tokens", step((0, n, 1)), step((0, n, 1), *[(200, 1, 1)] * 16)] for n in (16, 128, 512)]
    rows = [["held-out steps", "number", "median error", "9 of 10 below", "bias"]]
    for kind, errors in cost.errors.items():
        rows.append([kind, str(errors.num_steps), *(f"{100 * value:.1f} %" for value in (errors.median, errors.p90, errors.bias))])
    key = cost.fitted_for
    parts = [table(batches, " >>"), table(prompts, " >>"), table(rows, " >>>>")]
    head = "" if key is None else f"{key.model}, {key.isa}, {counted(key.threads, 'thread')}, {key.machine}\n"
    beside = f"beside the device {1e6 * cost.host_s:.0f} µs per step and {1e6 * cost.host_s_per_sequence:.1f} µs per sequence"
    wake = f"{1000 * cost.wake_s:.2f} ms after idleness"
    return f"{head}{cost.num_steps} steps fitted, {cost.about}; {beside}, {wake}\n\n" + "\n\n".join(parts)


def _rounded(value: Any) -> Any:
    """To six digits."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {key: _rounded(one) for key, one in value.items()}
    return [_rounded(one) for one in value] if isinstance(value, list) else value
