"""`octavo reproduce`: published figures made again, each with its files, and a report of all of them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from octavo.core.words import counted

if TYPE_CHECKING:
    from octavo.reproduce.registry import Entry


@click.command(name="reproduce")
@click.argument("figures", nargs=-1, required=True, metavar="NAME|all|list|report ...")
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), help="Folder for report.html and the files of each figure.")
@click.option(
    "--data",
    type=click.Path(path_type=Path, file_okay=False),
    help="Folder with the published data: machine table and traces of Splitwise.",
)
@click.option("--model", "-m", default="smollm2", show_default=True, help="What the measured figures run: as for `octavo serve`.")
@click.option("--seed", default=0, show_default=True, type=click.IntRange(0), help="Of everything that is drawn.")
@click.option("--quick", is_flag=True, help="Smaller loads, for a first look; the report says so.")
def reproduce(figures: tuple[str, ...], out: Path | None, data: Path | None, model: str, seed: int, quick: bool) -> None:
    """Make published figures again and print ours beside them, misses beside hits.

    NAME is a name or a number of `octavo reproduce list`, or a kind of evidence: measured, simulated or arithmetic. "all" makes every
    figure; "report" makes report.html anew from the files that are in --out, of earlier calls as well. Exit code 1 if a figure failed.
    """
    from octavo.reproduce.registry import ENTRIES, select

    if "list" in figures:
        if len(figures) > 1:
            raise click.UsageError("list goes alone")
        click.echo(_listing(ENTRIES))
        return
    if out is None:
        raise click.UsageError("--out: a folder is needed")
    if "report" in figures:
        if len(figures) > 1:
            raise click.UsageError("report goes alone")
        _report(out)
        return
    if data is not None and not data.is_dir():
        raise click.UsageError(f"--data: {data} is no folder")
    try:
        entries = select(figures)
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    from octavo.reproduce.runner import REPORT, run_entries
    from octavo.reproduce.setup import Setup

    setup = Setup(data, model, seed, quick, lambda line: click.echo(line, err=True))
    outcomes = run_entries(entries, setup, out, click.echo)
    failed = [outcome.entry.name for outcome in outcomes if outcome.error is not None]
    click.echo(f"{out / REPORT}: {len(outcomes) - len(failed)} of {len(outcomes)} made{', failed: ' if failed else ''}{', '.join(failed)}")
    if failed:
        sys.exit(1)


def _report(out: Path) -> None:
    from octavo.engine.user_files import write_whole
    from octavo.reproduce.files import read_outcomes
    from octavo.reproduce.report import html_report
    from octavo.reproduce.runner import REPORT

    outcomes, wrong = read_outcomes(out, lambda outcome: html_report([outcome]))
    for error in wrong:
        click.echo(f"octavo: {error}", err=True)
    if not outcomes:
        click.echo(f"octavo: {out}: no figure is there", err=True)
        sys.exit(1)
    write_whole(out / REPORT, html_report(outcomes))
    click.echo(f"{out / REPORT}: {counted(len(outcomes), 'figure')}" + (f"; left out, damaged: {len(wrong)}" if wrong else ""))
    if wrong:
        sys.exit(1)


def _listing(entries: tuple[Entry, ...]) -> str:
    from octavo.bench.tables import table
    from octavo.reproduce.registry import NOT_HERE

    rows = [["", "name", "evidence", "what"], *([str(e.number), e.name, e.evidence, e.title] for e in entries)]
    rows += [[str(number), "-", "not made here", reason] for number, reason in NOT_HERE.items()]
    return table(sorted(rows, key=lambda row: int(row[0] or 0)), ">")
