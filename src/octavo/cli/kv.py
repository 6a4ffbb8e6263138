"""`octavo kv`: what the KV cache on disk holds, and clearing it."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from octavo.engine.kv_disk import StoreInfo

_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
_LONGEST_S = 36500 * 86400


class Duration(click.ParamType):
    """A time such as 90m, 12h, 7d; a number alone is seconds."""

    name = "duration"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if isinstance(value, float):
            return value
        match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhdw]?)", str(value).strip().lower())
        if not match:
            self.fail(f"{value!r} is not a time such as 90m, 12h or 7d", param, ctx)
        seconds = float(match[1]) * _UNITS_S[match[2] or "s"]
        if seconds > _LONGEST_S:
            self.fail(f"{value!r} is not allowed; at most {_LONGEST_S // _UNITS_S['d']}d", param, ctx)
        return seconds


_path_help = "The folder that was given as --kv-disk-path (default: kv in $OCTAVO_HOME)."
_path_option = click.option("--path", type=click.Path(file_okay=False, path_type=Path), help=_path_help)


@click.group()
def kv() -> None:
    """The KV cache on disk: the blocks that `--kv-disk-path` keeps of prompts and answers."""


@kv.command("ls")
@_path_option
@click.option("--json", "as_json", is_flag=True, help="Print a JSON record for each store instead of a table.")
def list_(path: Path | None, as_json: bool) -> None:
    """List the stores in a folder: one for each model, format and block size, the last used first.

    Blocks are found again only by a model of the same fingerprint. Ages are those of the last use, of the newest and the oldest block.
    """
    from octavo.engine.kv_disk import list_stores

    stores = list_stores(_folder(path))
    if as_json:
        for store in stores:
            click.echo(json.dumps(_record(store)))
        return
    now_s = time.time()
    head = ("STORE", "MODEL", "BLOCK", "BLOCKS", "BYTES", "NEWEST", "OLDEST", "FINGERPRINT")
    rows: list[tuple[str, ...]] = [head, *(_row(store, now_s) for store in stores)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for row in rows:
        click.echo("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


@kv.command()
@_path_option
@click.option("--model", help="Only blocks of this model: as for `octavo serve`, or as `kv ls` names it.")
@click.option("--store", "name", help="Only the store whose name begins so.")
@click.option("--unused-for", type=Duration(), help="Only blocks that were not used for so long: 90m, 12h, 7d.")
@click.option("--yes", "-y", is_flag=True, help="Do not ask.")
def clear(path: Path | None, model: str | None, name: str | None, unused_for: float | None, yes: bool) -> None:
    """Delete blocks. Servers that use the folder go on: what they miss is computed."""
    from octavo.engine.kv_disk import clear_store, list_stores

    path = _folder(path)
    stores = list_stores(path)
    chosen = [store for store in stores if _matches(store, _names_of(model), name)]
    if not chosen and (model is not None or name is not None):
        there = ", ".join(f"{store.folder.name} ({store.about.model if store.about else '?'})" for store in stores) or "none"
        raise click.ClickException(f"{path} has no store of that name; there are: {there}")
    if not chosen:
        click.echo("nothing to clear")
        return
    if not yes:
        what = "all blocks" if unused_for is None else "the blocks not used for that long"
        click.confirm(f"Delete {what} of {len(chosen)} of the stores in {path}?", abort=True)
    unused_since_s = None if unused_for is None else time.time() - unused_for
    num_blocks = num_bytes = 0
    for store in chosen:
        blocks, size = clear_store(store, unused_since_s)
        num_blocks, num_bytes = num_blocks + blocks, num_bytes + size
    click.echo(f"cleared {num_blocks} blocks, {num_bytes} bytes")


def default_path() -> Path:
    from octavo.config import octavo_home

    return Path(octavo_home()) / "kv"


def _folder(path: Path | None) -> Path:
    """The folder to look into. One that was given has to be there; the default one is made when something is first kept in it."""
    if path is not None and not path.expanduser().is_dir():
        raise click.ClickException(f"--path: there is no folder {str(path)!r}")
    return default_path() if path is None else path.expanduser()


def _names_of(model: str | None) -> set[str] | None:
    """What a store of the model that ``--model`` names may be called: by that, or as the file behind it is. None: every store."""
    if model is None:
        return None
    from octavo.models.catalog import CATALOG

    file = CATALOG[model].file_name if model in CATALOG else model.removeprefix("hf:").replace(":", "/")
    last = Path(file).expanduser().resolve().name  # of "." too
    return {model, last, last.removesuffix(".gguf")}


def _matches(store: StoreInfo, models: set[str] | None, name: str | None) -> bool:
    of_model = models is None or (store.about is not None and store.about.model in models)
    return of_model and (name is None or store.folder.name.startswith(name))


def _record(store: StoreInfo) -> dict[str, Any]:
    about = store.about
    return {
        "store": store.folder.name,
        "model": about.model if about else None,
        "fingerprint": about.fingerprint if about else None,
        "block_size": about.block_size if about else None,
        "num_blocks": store.num_blocks,
        "num_bytes": store.num_bytes,
        "newest_s": store.newest_s,
        "oldest_s": store.oldest_s,
    }


def _row(store: StoreInfo, now_s: float) -> tuple[str, ...]:
    about = store.about
    known = (about.model, str(about.block_size), about.fingerprint) if about else ("?", "?", "?")
    ages = [_age(now_s, time_s) for time_s in (store.newest_s, store.oldest_s)]
    return store.folder.name, known[0], known[1], str(store.num_blocks), str(store.num_bytes), *ages, known[2]


def _age(now_s: float, time_s: float | None) -> str:
    if time_s is None:
        return "-"
    age_s = max(0.0, now_s - time_s)
    unit, seconds = next((u, s) for u, s in reversed(_UNITS_S.items()) if age_s >= s or u == "s")
    return f"{age_s / seconds:.0f}{unit}"
