"""What the JSON records of benches have in common."""

from __future__ import annotations

import time
from typing import Any

from octavo.engine.engine import Engine


def measured_with(engine: Engine) -> dict[str, Any]:
    """On what and when it was measured; of a backend without threads or kernel paths these are None."""
    backend = engine.backend
    return {
        "threads": getattr(backend, "threads", None),
        "isa": getattr(backend, "isa", None),
        "fingerprint": backend.fingerprint(),
        "date": time.strftime("%Y-%m-%d"),
    }
