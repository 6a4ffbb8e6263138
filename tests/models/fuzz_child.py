"""The child process of ``fuzz_files.run_in_child``: arguments are headroom in bytes, seconds a file may take, and the good models.

It first opens and runs the good models, so that all code is loaded, and only then limits its own address space and says "ready". Then
one path a line comes in and one JSON object a line goes out. A file that takes too long ends the process (the alarm is not caught);
one that needs more memory than there is shows as MemoryError or as an abort.
"""

from __future__ import annotations

import json
import resource
import signal
import sys
import time
import warnings
from array import array

from octavo.backends.reference.backend import ReferenceBackend
from octavo.config import CacheConfig, EngineConfig
from octavo.core.step import SequenceSlice, StepPlan
from octavo.models.loading import load_model
from octavo.models.model_file import ModelFileError


def run(path: str) -> None:
    """Load the model, encode and decode a text, and compute the logits of three tokens."""
    model = load_model(path)
    ids = model.tokenizer.encode("the quick brown fox")
    model.tokenizer.decode(ids)
    backend = ReferenceBackend(model, EngineConfig(cache=CacheConfig(block_size=4)))
    backend.allocate_kv(1)
    backend.all_logits = True
    backend.execute(StepPlan(0, [SequenceSlice(0, 0, list(ids[:3]), array("i", [0]))]))


def limit_address_space(headroom_bytes: int) -> None:
    with open("/proc/self/statm") as file:
        in_use = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (in_use + headroom_bytes,) * 2)


def outcome(path: str, timeout_s: float) -> dict[str, object]:
    """Fields of ``fuzz_files.Outcome``."""
    started = time.perf_counter()
    signal.setitimer(signal.ITIMER_REAL, timeout_s)
    try:
        run(path)
        result, detail = "runs", ""
    except ModelFileError as exc:
        result, detail = "refused", str(exc)
    except Exception as exc:  # whatever else it is, the parent must see it
        result, detail = type(exc).__name__, str(exc)
    signal.setitimer(signal.ITIMER_REAL, 0)
    return {"result": result, "detail": detail[:500], "seconds": time.perf_counter() - started}


def main() -> None:
    warnings.simplefilter("ignore")  # damaged weights overflow when they are computed with
    headroom_bytes, timeout_s, good_paths = int(sys.argv[1]), float(sys.argv[2]), sys.argv[3:]
    for path in good_paths:
        run(path)
    limit_address_space(headroom_bytes)
    print("ready", flush=True)
    for line in sys.stdin:
        print(json.dumps(outcome(line.rstrip("\n"), timeout_s)), flush=True)


if __name__ == "__main__":
    main()
