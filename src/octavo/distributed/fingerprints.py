"""Who may stand beside whom: workers give the same answers to the bit only when their fingerprints are equal. Pure.

A worker's fingerprint is ``MODEL/BACKEND``: that of its model, as its front end reads it from the file, and what its backend computes it
with, in parts that colons separate.
"""

from __future__ import annotations


def misfit(model: str, fingerprint: str, model_fingerprint: str, others: str | None) -> str | None:
    """Why a worker with ``model`` and ``fingerprint`` cannot join; None: it can. ``model_fingerprint``: of the front end's model;
    ``others``: of the workers before it, if there were any. What differs is named, and what can be done about it."""
    own, slash, backend = fingerprint.partition("/")
    if not slash or own != model_fingerprint:
        limit = f"this front end's has {model_fingerprint}. A file that was replaced is served by a front end that is started anew"
        return f"its model {model!r} is another: its fingerprint is {own}; {limit}"
    if others is None or fingerprint == others:
        return None
    mine, theirs = backend.split(":"), others.partition("/")[2].split(":")
    length = max(len(mine), len(theirs))
    mine, theirs = ([*parts, *["nothing"] * (length - len(parts))] for parts in (mine, theirs))
    pairs = [f"{a} where they have {b}" for a, b in zip(mine, theirs, strict=True) if a != b]
    return f"it computes otherwise than the workers before it, with {', '.join(pairs)}: answers would depend on who gives them"
