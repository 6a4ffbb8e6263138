"""The child process of ``fuzz_files.run_in_child``: arguments are a backend, headroom in bytes, seconds a file may take, the good models.

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

from octavo.backends.base import Backend, BackendError
from octavo.backends.registry import backend_class
from octavo.config import BackendConfig, EngineConfig
from octavo.core.request import SamplingParams
from octavo.core.step import SequenceSlice, SlotOpen, StepPlan
from octavo.models.loading import load_model
from octavo.models.model_file import ModelFileError

CONFIGS = {
    "reference": [BackendConfig("reference")],
    "cpu": [BackendConfig("cpu", "fast", threads=2), BackendConfig("cpu", "f32", threads=1)],
}


def run(path: str, backend: str) -> None:
    """Load the model, encode and decode a text, and compute a few steps of it."""
    model = load_model(path)
    ids = model.tokenizer.encode("the quick brown fox")
    model.tokenizer.decode(ids)
    for config in CONFIGS[backend]:
        made = backend_class(backend)(model, EngineConfig(backend=config))  # type: ignore[call-arg]
        try:
            made.allocate_kv(2)
            run_steps(made, list(ids[:3]))
        finally:
            made.close()


def run_steps(backend: Backend, ids: list[int]) -> None:
    """A prompt with the logits of every row, then two tokens; a row that allows no answer is followed by token 0."""
    table, params = array("i", [1, 0]), SamplingParams(temperature=0.0)
    first = SequenceSlice(0, 0, ids, table, 1, [0], logprobs=2, prompt_logprobs=2, next_token_ids=ids[1:])
    plan = StepPlan(0, [first], slot_opens=[SlotOpen(0, params, 1, ids, [])])
    for position in range(len(ids), len(ids) + 3):
        result = backend.execute(plan).slices[0]
        token = result.token_ids[0] if result.error is None else 0
        plan = StepPlan(position, [SequenceSlice(0, position, [token], table, 1, [0])])


def limit_address_space(headroom_bytes: int) -> None:
    with open("/proc/self/statm") as file:
        in_use = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (in_use + headroom_bytes,) * 2)


def outcome(path: str, backend: str, timeout_s: float) -> dict[str, object]:
    """Fields of ``fuzz_files.Outcome``."""
    started = time.perf_counter()
    signal.setitimer(signal.ITIMER_REAL, timeout_s)
    try:
        run(path, backend)
        result, detail = "runs", ""
    except (ModelFileError, BackendError) as exc:
        result, detail = "refused", str(exc)
    except Exception as exc:  # whatever else it is, the parent must see it
        result, detail = type(exc).__name__, str(exc)
    signal.setitimer(signal.ITIMER_REAL, 0)
    return {"result": result, "detail": detail[:500], "seconds": time.perf_counter() - started}


def main() -> None:
    warnings.simplefilter("ignore")  # damaged weights overflow when they are computed with
    backend, headroom_bytes, timeout_s, good_paths = sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), sys.argv[4:]
    for path in good_paths:
        run(path, backend)
    limit_address_space(headroom_bytes)
    print("ready", flush=True)
    for line in sys.stdin:
        print(json.dumps(outcome(line.rstrip("\n"), backend, timeout_s)), flush=True)


if __name__ == "__main__":
    main()
