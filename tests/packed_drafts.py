"""Drafts to test with: a real model packed anew at about 3 bits, which agrees with it often, and far from always."""

from __future__ import annotations

import hashlib
from importlib import resources
from pathlib import Path

from octavo.quantization.requantize import Calibration, Recipe, quantize

RECIPE = Recipe("q3_k", "q3_k", few_levels=True)
CALIBRATION = Calibration("Tests are exact and deterministic: values are compared bit for bit, and random cases come from fixed seeds.")


def packed_draft(source: Path) -> Path:
    """The draft of the model at ``source``, beside it in the cache; made when there is none of this model by this code (some seconds)."""
    code = [file.read_bytes() for file in sorted(resources.files("octavo.quantization").iterdir(), key=str) if file.name.endswith(".py")]
    made_of = (str(source.stat().st_size), str(source.stat().st_mtime_ns), repr(RECIPE), repr(CALIBRATION))
    digest = hashlib.sha256(b"".join(code) + "".join(made_of).encode()).hexdigest()[:16]
    folder = source.parent / ".test-drafts"  # `octavo models` lists no hidden folders
    folder.mkdir(exist_ok=True)
    draft = folder / f"{source.stem}-{digest}.gguf"
    if not draft.exists():
        for old in folder.glob(f"{source.stem}-*.gguf"):
            old.unlink(missing_ok=True)
        quantize(source, draft, RECIPE, CALIBRATION, overwrite=True)
    return draft
