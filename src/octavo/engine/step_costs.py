"""Where the calibrated step costs of this machine are kept, and which of them an engine may start from.

Owns the folder $OCTAVO_HOME/costs: one file for each combination of machine, kernels, threads and model in the form in which it is
computed. A file that is damaged, or says that it is for something else, is a warning and no cost. What is in a file is
``costs.coefficients``'s business; measuring is ``engine.calibrate``'s.
"""

from __future__ import annotations

import logging
from hashlib import blake2b
from pathlib import Path

from octavo.backends.base import Backend
from octavo.backends.machine_facts import cpu_model
from octavo.config import octavo_home
from octavo.core.cost import StepShape
from octavo.costs.coefficients import Coefficients, CostFileError, FittedFor, read_coefficients
from octavo.engine.user_files import write_whole

logger = logging.getLogger("octavo.engine")


def fitted_for(backend: Backend, model: str = "", date: str = "") -> FittedFor | None:
    """What a cost of this backend's steps holds for. None: a backend that does not say what it computes with, and is never calibrated."""
    isa, threads = getattr(backend, "isa", None), getattr(backend, "threads", None)
    if not isinstance(isa, str) or not isinstance(threads, int):
        return None
    return FittedFor(cpu_model(), isa, threads, backend.fingerprint(), model, date)


def cost_folder() -> Path:
    return Path(octavo_home()) / "costs"


def cost_file(key: FittedFor) -> Path:
    """Where a cost that holds for ``key`` is kept."""
    text = "\n".join((key.machine, key.isa, str(key.threads), key.fingerprint))
    return cost_folder() / f"{blake2b(text.encode(), digest_size=12).hexdigest()}.json"


def write_cost(cost: Coefficients, path: Path) -> None:
    """Readers see the old file or the new one. No folder is made. Raises UserFileError."""
    write_whole(path, cost.to_json() + "\n")


def calibrated_cost(backend: Backend) -> Coefficients | None:
    """What `octavo calibrate` has found of this backend's steps on this machine; None when it has not, or when what is there is of no use,
    which is a warning."""
    if not cost_folder().is_dir() or (key := fitted_for(backend)) is None:
        return None
    path = cost_file(key)
    try:
        cost = read_coefficients(path)
    except FileNotFoundError:
        return None
    except (OSError, CostFileError) as error:
        logger.warning("%s: the cost of steps is learned anew; `octavo calibrate` makes another file", error)
        return None
    if cost.fitted_for is None or not cost.fitted_for.same_as(key) or not sum(cost.parts_of(StepShape(num_rows=1, num_sequences=1))) > 0.0:
        logger.warning("%s: it is not for this machine, model and number of threads; the cost of steps is learned anew", path)
        return None
    return cost
