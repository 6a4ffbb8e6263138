"""Numbers in sentences, and values of files as the files have them."""

from __future__ import annotations

import json


def counted(number: int | float, singular: str, plural: str | None = None, form: str = "") -> str:
    """"1 token", "2 tokens": ``number`` by ``form`` before its noun, whose plural is made with an s unless it is given."""
    return f"{number:{form}} {singular if number == 1 else plural or singular + 's'}"


def as_written(value: object, most: int = 80) -> str:
    """A value that was read from a file, as JSON and TOML write it, texts and numbers as everywhere; of a long one the beginning."""
    plain = isinstance(value, (str, int, float)) and not isinstance(value, bool)
    text = repr(value) if plain else json.dumps(value, default=str, ensure_ascii=False)
    return text if len(text) <= most else text[: most - 1] + "…"
