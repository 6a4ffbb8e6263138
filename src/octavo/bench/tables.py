"""Plain text tables of aligned columns."""

from __future__ import annotations

from collections.abc import Sequence


def table(rows: Sequence[Sequence[str]], right: str = "", indent: str = "") -> str:
    """``rows`` of equal length, the first one the head. ``right``: a ">" for each column that is aligned to the right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]

    def cell(text: str, i: int) -> str:
        return text.rjust(widths[i]) if right[i : i + 1] == ">" else text.ljust(widths[i])

    return "\n".join((indent + "  ".join(cell(text, i) for i, text in enumerate(row))).rstrip() for row in rows)
