"""The doctor's verdicts on kernels, kept between processes: which entries of which kernel path were wrong on this machine.

Owns the file $OCTAVO_HOME/kernels.json. A verdict holds for one CPU and one build of the native module; others are never read for it.
Never checks a kernel and never chooses one: see ``kernel_path``.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
from functools import cache
from pathlib import Path

from octavo.backends.machine_facts import cpu_model
from octavo.config import octavo_home

logger = logging.getLogger("octavo.backends")

WrongKernels = dict[str, str]  # entry -> what was wrong with it
_FORMAT = 1
_MAX_MACHINES = 32  # a home folder shared by many machines and builds stays small; the oldest go first


def verdict_file() -> Path:
    return Path(octavo_home()) / "kernels.json"


@cache
def build_id() -> str:
    """Names the native module to the byte."""
    from octavo.backends.cpu import _native

    return hashlib.sha256(Path(str(_native.__file__)).read_bytes()).hexdigest()[:16]


def read_verdicts() -> dict[str, WrongKernels]:
    """Kernel level -> its wrong entries, of the levels that were checked here with this build. A file that cannot be read is a warning."""
    machines = _read_machines()
    # Hashing the module takes milliseconds; nearly always there is nothing wrong to look up.
    if not any(wrong for machine in machines.values() for wrong in machine.values()):
        return {}
    return machines.get(_key(), {})


def write_verdicts(levels: dict[str, WrongKernels]) -> None:
    """Record the verdict on each of these levels; those on other levels stay. Raises OSError. Readers see the old file or the new one."""
    machines = _read_machines()
    machine = machines.pop(_key(), {}) | levels
    kept = dict(list(machines.items())[-(_MAX_MACHINES - 1) :]) | {_key(): machine}
    path = verdict_file()
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=".kernels-", dir=path.parent)
    try:
        with os.fdopen(handle, "w") as file:
            json.dump({"format": _FORMAT, "machines": kept}, file, indent=1)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


def _key() -> str:
    return f"{cpu_model()}; build {build_id()}"


def _read_machines() -> dict[str, dict[str, WrongKernels]]:
    path = verdict_file()
    try:
        text = path.read_text()
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError) as e:
        logger.warning("%s cannot be read (%s): kernels that were found wrong may be used; run `octavo doctor`", path, e)
        return {}
    try:
        content = json.loads(text)
        if content["format"] != _FORMAT:
            raise ValueError(f"format {content['format']!r}")
        return {
            str(key): {str(level): {str(entry): str(why) for entry, why in wrong.items()} for level, wrong in levels.items()}
            for key, levels in content["machines"].items()
        }
    except (ValueError, KeyError, TypeError, AttributeError) as e:
        logger.warning("%s is not what `octavo doctor` writes (%s): kernels that were found wrong may be used; run it again", path, e)
        return {}
