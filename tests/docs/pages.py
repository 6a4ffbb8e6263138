"""Reading the project's pages: sections and tables of Markdown, as tests compare them with the code."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def page(name: str) -> str:
    return (ROOT / name).read_text()


def section(text: str, title: str) -> str:
    """What stands below the heading ``title``, up to the next heading of the same or a higher level."""
    found = re.search(rf"^(#+) {re.escape(title)}$", text, re.MULTILINE)
    assert found is not None, f"there is no section {title!r}"
    rest = text[found.end() :]
    end = re.search(rf"^#{{1,{len(found[1])}}} ", rest, re.MULTILINE)
    return rest[: end.start()] if end else rest


def own_part(text: str, title: str) -> str:
    """As ``section``, without the sections below it."""
    return re.split(r"^#+ ", section(text, title), maxsplit=1, flags=re.MULTILINE)[0]


def tables(text: str) -> list[list[list[str]]]:
    """All tables of a text as rows of cells, without heads and rules."""
    found, current = [], []
    for line in [*text.splitlines(), ""]:
        if line.startswith("|"):
            current.append([cell.strip() for cell in line.strip("|").replace("\\|", "\0").split("|")])
            current[-1] = [cell.replace("\0", "|") for cell in current[-1]]
        elif current:
            found.append(current[2:])
            current = []
    return found


def code(cell: str) -> str:
    """The first code span of a cell."""
    found = re.search(r"`([^`]*)`", cell)
    assert found is not None, cell
    return found[1]


def rows_by_name(text: str) -> dict[str, list[str]]:
    """Rows of all tables of a text by the code in their first cell. A name may stand there once."""
    rows = [row for table in tables(text) for row in table]
    by_name = {code(row[0]): row for row in rows}
    assert len(by_name) == len(rows), "a name has two rows"
    return by_name
