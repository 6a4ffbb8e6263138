"""Real text for real models: the pages of this project and the works of `octavo bench spec`."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

from octavo.bench.spec_prompts import WORKS


@cache
def paragraphs() -> tuple[str, ...]:
    """English text, tables and commands of this project's pages; read once, so that an edit meanwhile changes no prompt."""
    pages = sorted((Path(__file__).parents[2] / "docs").glob("*.md"))
    return tuple(p.strip() for page in pages for p in re.split(r"\n\s*\n", page.read_text()) if len(p.strip()) > 60)


def real_prompts(count: int) -> list[str]:
    """The beginnings of paragraphs, some behind the one before them, and the works of the bench, evenly chosen."""
    pieces = paragraphs()
    texts = [text for work in WORKS for text in work.prompts]
    texts += [piece[: 60 + 97 * i % 700] for i, piece in enumerate(pieces)]
    texts += [f"{before[:500]}\n\n{piece[:80]}" for before, piece in zip(pieces, pieces[1:], strict=False)]
    return [texts[i * len(texts) // count] for i in range(count)]
