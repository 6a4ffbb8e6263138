"""What a server may be told beside its engine's configuration. Imports nothing of the server, so that a bad option costs no start."""

from __future__ import annotations

import math
from dataclasses import dataclass

from octavo.config import ConfigError


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """``head_s``: how long a client may take to send a request's head. ``stall_s``: how long it may accept nothing of a waiting answer, or
    dawdle over a body, before it is cut off. ``drain_s``: how long running requests may go on after SIGTERM. ``explain_cache``: usage
    says why a prompt was found no further in the prefix cache, which tells clients of each other's prompts."""

    api_key: str | None = None
    max_body_bytes: int = 32 << 20
    head_s: float = 30.0
    stall_s: float = 120.0
    drain_s: float = 30.0
    explain_cache: bool = False

    def __post_init__(self) -> None:
        """Raise ConfigError for the first field outside its limits."""
        if self.api_key is not None and not self.api_key.strip():
            raise ConfigError("api_key: it is empty; None serves without one")
        if self.max_body_bytes < 1:
            raise ConfigError(f"max_body_size: {self.max_body_bytes!r} is not allowed; at least 1 byte")
        for name, value in (("head_s", self.head_s), ("stall_s", self.stall_s)):
            if not (math.isfinite(value) and value > 0):
                raise ConfigError(f"{name}: {value!r} is not allowed; a finite number of seconds above 0")
        if not (math.isfinite(self.drain_s) and self.drain_s >= 0):
            raise ConfigError(f"drain_s: {self.drain_s!r} is not allowed; a finite number of seconds from 0")
