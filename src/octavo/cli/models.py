"""`octavo pull` and `octavo models`."""

from __future__ import annotations

from pathlib import Path

import click

from octavo.cli.progress import fetch


@click.command()
@click.argument("name")
def pull(name: str) -> None:
    """Download a model into the cache and print its path.

    NAME is a name that `octavo models` lists, or hf:owner/repo[:file] of a model hub. What is there already is not fetched again.
    """
    click.echo(fetch(name))


@click.command()
def models() -> None:
    """List the models of the catalogue and the cache.

    With the bytes of their weights, the context they were trained for, and what a token of context takes in the KV cache (16 bit).
    The cache is the folder "models" in $OCTAVO_HOME (default: ~/.cache/octavo).
    """
    from octavo.models.catalog import CATALOG, cached_path, models_folder

    rows = [("NAME", "WEIGHTS", "CONTEXT", "KV/TOKEN", "FILE")]
    known = set()
    for entry in CATALOG.values():
        path = cached_path(entry)
        known.add(entry.file_name)
        if path is None:
            rows.append((entry.name, f"{entry.size_bytes / 1e6:.0f} MB", "-", "-", f"not here; octavo pull {entry.name}"))
        else:
            rows.append(_describe(entry.name, path))
    for path in sorted(_cached_models(models_folder())):
        if path.name not in known:
            rows.append(_describe(_spec(path.relative_to(models_folder())), path))
    widths = [max(len(row[i]) for row in rows) for i in range(4)]
    for row in rows:
        click.echo("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=False)) + "  " + row[4])


def _cached_models(folder: Path) -> list[Path]:
    """GGUF files (first parts only) and safetensors folders below the cache folder."""
    ggufs = [p for p in folder.rglob("*.gguf") if "-of-" not in p.name or "-00001-of-" in p.name]
    folders = [p.parent for p in folder.rglob("config.json")]
    return [p for p in ggufs + folders if not any(part.startswith(".") for part in p.relative_to(folder).parts)]


def _spec(path: Path) -> str:
    """How --model names a file or folder at ``path`` in the cache: hf:owner/repo[:file] for those of a hub."""
    top, *rest = path.parts
    if top != "hf" or len(rest) < 2:
        return str(path)
    repo = "hf:" + "/".join(rest[:2])
    return f"{repo}:{'/'.join(rest[2:])}" if len(rest) > 2 else repo


def _describe(name: str, path: Path) -> tuple[str, str, str, str, str]:
    from octavo.models.loading import load_model

    try:
        model = load_model(path)
    except ValueError as e:
        return name, "-", "-", "-", f"cannot be served: {e}"
    return (
        name,
        f"{model.weight_bytes / 1e6:.0f} MB",
        str(model.program.context),
        f"{model.program.kv_bytes_per_token(2)} B",
        str(path),
    )
