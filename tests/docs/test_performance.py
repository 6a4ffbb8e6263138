"""The table of bits per weight in docs/performance.md is what files hold and what the native packer makes of them."""

from __future__ import annotations

import pytest

from octavo.models.model_file import BLOCK_SIZES
from octavo.workload.traces import FORMATS
from tests.docs.pages import code, page, section, tables

ROWS, COLUMNS = 256, 1024
((*TABLE,),) = tables(section(page("docs/performance.md"), "The floor of decoding"))


@pytest.mark.parametrize("row", TABLE, ids=lambda r: r[0])
def test_bits_per_weight(row: list[str]) -> None:
    from octavo.backends.cpu import _native

    name, in_file, packed = row[0].lower(), float(row[1]), float(row[2])
    values, num_bytes = BLOCK_SIZES[name]
    assert 8 * num_bytes / values == in_file
    model = _native.Model("portable", 1)
    model.add_matrix(name, bytes(ROWS * COLUMNS // values * num_bytes), ROWS, COLUMNS, False)
    assert 8 * model.packed_bytes() / (ROWS * COLUMNS) == packed


def test_every_format_is_there() -> None:
    assert {row[0].lower() for row in TABLE} == {name for name in BLOCK_SIZES if name[0] == "q" or name in ("f16", "bf16", "f32")}


def test_traces() -> None:
    (table,) = tables(section(page("docs/performance.md"), "Traces"))
    shown = {row[0]: tuple(map(code, row[1].split(", "))) for row in table}
    assert shown == {known.name: known.columns for known in FORMATS}
