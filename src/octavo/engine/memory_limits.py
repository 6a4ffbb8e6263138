"""What a pool of KV may take of the machine's memory. Says no, or warns; takes nothing itself."""

from __future__ import annotations

import logging

from octavo.backends import machine
from octavo.config import ConfigError

logger = logging.getLogger("octavo.engine")


def check_memory(field: str, value: object, num_bytes: int) -> None:
    """Raise ConfigError when ``num_bytes``, which ``field`` of ``value`` asks for, are more than the machine has.

    Pools are address space until they are written, so that one which can never be filled would seem to start well, and end much later with
    a killed process. More than what is available now is a warning alone: others may give it back.
    """
    total = machine.physical_memory_bytes()
    if num_bytes > total:
        limit = f"{_size(num_bytes)} are more than the {_size(total)} of memory that this machine has"
        raise ConfigError(f"{field}: {value!r} is not allowed; {limit}")
    available = machine.available_memory_bytes()
    if num_bytes > available:
        logger.warning("%s: %s asks for %s of memory, and %s are available now", field, value, _size(num_bytes), _size(available))


def _size(num_bytes: int) -> str:
    return f"{num_bytes} bytes ({num_bytes / 2**30:.1f} GiB)"
