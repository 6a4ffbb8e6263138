"""`octavo quantize`: a GGUF model packed anew in fewer bits."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from octavo.quantization.requantize import Packed

TYPES = ("q2_k", "q3_k", "q4_0", "q4_1")
_AS_IT_IS = "same"
_TYPE_HELP = "Of the layers' matrices: 2.6, 3.4, 4.5 or 5 bits a weight. Rows that blocks of 256 do not divide become q4_0 at least."
_OUTPUT_HELP = "Of the output matrix; same: as it is."
_FEW_HELP = "Those rows become as coarse as the type instead: 4 or 8 of the levels of q4_1, in its 5 bits. For experiments."
_TEXT_HELP = "Text that the model reads first, to see which of its weights matter (default: one of the package's)."
_TOKENS_HELP = "Tokens of it, at most; 0: read nothing, all weights count alike."


@click.command()
@click.argument("source")
@click.argument("target", type=click.Path(path_type=Path))
@click.option("--type", "layers", type=click.Choice(TYPES), default="q4_0", show_default=True, help=_TYPE_HELP)
@click.option("--output-type", "output", type=click.Choice((*TYPES, _AS_IT_IS)), default="q4_1", show_default=True, help=_OUTPUT_HELP)
@click.option("--few-levels", is_flag=True, help=_FEW_HELP)
@click.option("--text", "text_file", type=click.File(encoding="utf-8"), help=_TEXT_HELP)
@click.option("--text-tokens", type=click.IntRange(0), default=512, show_default=True, help=_TOKENS_HELP)
@click.option("--force", is_flag=True, help="Overwrite TARGET.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of a table.")
def quantize(
    source: str,
    target: Path,
    layers: str,
    output: str,
    few_levels: bool,
    text_file: IO[str] | None,
    text_tokens: int,
    force: bool,
    as_json: bool,
) -> None:
    """Pack a model anew in fewer bits: a GGUF file, to draft for the model that it is made of.

    SOURCE is a GGUF file or what else `--model` takes that is one; TARGET is the file to write. Norms, biases and metadata stay as they
    are, and so does what would not get smaller. `octavo bench spec --model SOURCE --draft-model TARGET` shows what the draft is worth.
    """
    from octavo.bench.tables import table
    from octavo.cli.progress import fetch, passing_line
    from octavo.quantization import requantize

    recipe = requantize.Recipe(layers, None if output == _AS_IT_IS else output, few_levels)
    recipe.check()
    if text_file is not None and not text_tokens:
        raise click.UsageError("--text is not read with --text-tokens 0; leave out one of them")
    text = _package_text() if text_file is None else text_file.read()
    calibration = requantize.Calibration(text, text_tokens) if text_tokens else None

    path = Path(fetch(source))
    with passing_line() as show:
        progress = (lambda what: show(f"{what} ...")) if show is not None else (lambda what: None)
        packed = requantize.quantize(path, target, recipe, calibration, force, progress)
    groups = _grouped(packed)
    if as_json:
        click.echo(json.dumps({"target": str(target), "bytes": target.stat().st_size, "matrices": groups}))
        return
    click.echo(table([("MATRICES", "", "WAS", "IS", "LEVELS", "ERROR", "BYTES WERE", "ARE"), *map(_row, groups)]))
    click.echo(f"{target}: {target.stat().st_size / 1e6:.0f} MB")


def _package_text() -> str:
    from importlib import resources

    return resources.files("octavo.bench").joinpath("prompts.txt").read_text(encoding="utf-8")


def _grouped(packed: Iterable[Packed]) -> list[dict[str, Any]]:
    """One record for all matrices of one role that went the same way."""
    from octavo.quantization.block_encoding import WHOLE_RANGE

    groups: dict[tuple[str, str, str, int], list[Packed]] = {}
    for one in packed:
        groups.setdefault((one.role, one.tensor.dtype, one.dtype, one.levels), []).append(one)
    return [
        {
            "role": role, "count": len(group), "was": was, "is": now, "levels": None if levels == WHOLE_RANGE else levels,
            "error": None if group[0].kept else _relative_error(group),
            "bytes_before": sum(len(one.tensor.data) for one in group), "bytes": sum(one.num_bytes for one in group),
        }
        for (role, was, now, levels), group in groups.items()
    ]  # fmt: skip


def _relative_error(group: list[Packed]) -> float:
    squares = sum(one.squares for one in group)
    return round((sum(one.squared_error for one in group) / squares) ** 0.5, 4) if squares else 0.0


def _row(group: dict[str, Any]) -> tuple[str, ...]:
    error = "-" if group["error"] is None else f"{100 * group['error']:.1f} %"
    sizes = (str(group["bytes_before"]), str(group["bytes"]))
    return (group["role"], str(group["count"]), group["was"], group["is"], str(group["levels"] or "-"), error, *sizes)
