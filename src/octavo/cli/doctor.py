"""`octavo doctor`: limits of this machine, and whether the kernels are right and fast on it."""

from __future__ import annotations

import sys

import click


@click.command()
@click.option("--isa", metavar="LEVEL", help="Kernel level to examine, such as avx2 (default: the one that is used).")
@click.option("--all-isa", is_flag=True, help="Examine every kernel level that this machine has.")
@click.option("--threads", type=click.IntRange(1, 1024), help="Compute threads (default: one per core this process may use).")
@click.option("--quick", is_flag=True, help="Shorter measurements, less exact: a few seconds instead of up to a minute.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of tables.")
def doctor(isa: str | None, all_isa: bool, threads: int | None, quick: bool, as_json: bool) -> None:
    """Measure this machine and check every kernel on it.

    Probes what memory and arithmetic could do, compares every kernel and format with a slow loop, and shows how near to the limits
    they come. A kernel that is wrong on this machine is not used from then on; the exit code is then 1.
    """
    if isa is not None and all_isa:
        raise click.UsageError("--isa names one level, --all-isa takes all; leave out one of them")
    import json

    from octavo.backends.cpu import _native
    from octavo.bench.doctor import DoctorOptions, examine
    from octavo.bench.doctor_text import report_text

    here = tuple(_native.isa_levels())
    wanted = here[-1] if isa == "avx512" and here[-1].startswith(isa) else isa  # the better of two
    if wanted is not None and wanted not in here:
        raise click.BadParameter(f"{isa!r} is not available here; this machine has {', '.join(here)}", param_hint="'--isa'")
    levels = here[::-1] if all_isa else (wanted,) if wanted is not None else ()

    def progress(what: str) -> None:
        if sys.stderr.isatty():
            click.echo(f"\r{what} ...\x1b[K", nl=False, err=True)

    report = examine(DoctorOptions(levels, threads, quick), progress)
    if sys.stderr.isatty():
        click.echo("\r\x1b[K", nl=False, err=True)
    click.echo(json.dumps(report.record()) if as_json else report_text(report))
    if not report.all_right:
        sys.exit(1)
