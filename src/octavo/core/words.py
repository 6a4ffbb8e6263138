"""Numbers in sentences."""

from __future__ import annotations


def counted(number: int | float, singular: str, plural: str | None = None, form: str = ",") -> str:
    """"1 token", "2 tokens": ``number`` by ``form`` before its noun, whose plural is made with an s unless it is given."""
    return f"{number:{form}} {singular if number == 1 else plural or singular + 's'}"
