"""Typed, checked reading of a model's description, whatever file it comes from.

The description is untrusted: every value is checked for type and range before anything is made from it. Families ask for
neutral names ("hidden", "window"); a subclass says which keys of its file answer to them. What was asked for is remembered,
so that a feature the file states and nobody asked about can be refused rather than ignored.
Never knows a family by name, never builds ops.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Collection, Mapping

from octavo.models.program import RopeScaling

INT32_MAX = 2**31 - 1
MOST_LAYERS = 1 << 12  # of a description without tensors
REQUIRED = object()  # default of a field without which a model cannot be described

# Upper ends for sizes (inclusive): several times those of the largest known models, and small enough that products stay exact everywhere.
SIZE_LIMITS = {
    "hidden": 1 << 18,
    "ff": 1 << 20,
    "heads": 1 << 12,
    "kv_heads": 1 << 12,
    "head_dim": 1 << 12,
    "vocab_size": 1 << 23,
    "context": INT32_MAX,
    "window": INT32_MAX,
    "window_pattern": 1 << 12,
    "max_window_layers": INT32_MAX,
}


class FamilyError(ValueError):
    """A model's description is unknown, incomplete, out of range or asks for what is not implemented; the message names the key."""


class Fields:
    """Base of the two readers. ``values``: the file's keys; ``keys``: neutral name -> candidate keys, first present wins;
    ``defaults``: neutral name -> value used when no candidate is present.
    """

    def __init__(self, values: Mapping[str, object], keys: Mapping[str, tuple[str, ...]], defaults: Mapping[str, object]) -> None:
        self.values = values
        self.keys = keys
        self.defaults = defaults
        self.asked: set[str] = set()

    def raw(self, name: str, default: object = REQUIRED) -> tuple[str, object]:
        """(key, value) of a neutral name. A key that is there with null counts as there."""
        candidates = self.keys.get(name, ())
        self.asked.update(candidates)
        for key in candidates:
            if key in self.values:
                return key, self.values[key]
        if name in self.defaults:
            return candidates[0], self.defaults[name]
        if default is REQUIRED:
            raise FamilyError(f"{candidates[0]} is missing: a model cannot be described without it")
        return candidates[0] if candidates else name, default

    def integer(self, name: str, default: object = REQUIRED, low: int = 1) -> int:
        """An integer from ``low`` to the limit of SIZE_LIMITS."""
        key, value = self.raw(name, default)
        return as_integer(key, value, low, SIZE_LIMITS[name])

    def optional_integer(self, name: str, default: int | None = None, low: int = 1) -> int | None:
        """As ``integer``, with null allowed."""
        key, value = self.raw(name, default)
        return None if value is None else as_integer(key, value, low, SIZE_LIMITS[name])

    def positive(self, name: str, default: object = REQUIRED) -> float:
        """A finite number above 0."""
        key, value = self.raw(name, default)
        return as_positive(key, value)

    def optional_positive(self, name: str, default: float | None = None, zero_is_off: bool = False) -> float | None:
        """As ``positive``, with null allowed (and 0 too where a file writes 0 for "off")."""
        key, value = self.raw(name, default)
        if value is None or (zero_is_off and value == 0 and not isinstance(value, bool)):
            return None
        return as_positive(key, value)

    def flag(self, name: str, default: bool) -> bool:
        key, value = self.raw(name, default)
        if not isinstance(value, bool):
            raise FamilyError(refused(key, value, "true or false"))
        return value

    def window(self) -> int | None:
        """Positions a local layer sees, its own included; 0 and null both mean that there is no window."""
        return self.optional_integer("window", None, low=0) or None


def refused(key: str, value: object, limit: str) -> str:
    return f"{key}: {reprlib.repr(value)} is not allowed; {limit}"


def as_integer(key: str, value: object, low: int, high: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise FamilyError(refused(key, value, f"an integer from {low} to {high}"))
    return int(value)


def as_positive(key: str, value: object) -> float:
    # A JSON integer may be too large for a float; the bound keeps every use of it finite in float32.
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0.0 < value < 1e30:
        raise FamilyError(refused(key, value, "a finite number above 0"))
    return float(value)


def inverse_sqrt(value: float) -> float:
    return 1.0 / math.sqrt(value)


def linear_scaling(key: str, factor: object) -> RopeScaling:
    value = as_positive(key, factor)
    return RopeScaling() if value == 1.0 else RopeScaling(kind="linear", factor=value)


def refuse_layers_beyond(key: str, layers: int, tensor_names: Collection[str] | None) -> int:
    """A layer has tensors of its own, so more layers than tensors is a lie, found before anything of that length is made.

    ``tensor_names`` None: nobody knows the tensors, and a limit far above all models stands in.
    """
    if tensor_names is None:
        return as_integer(key, layers, 1, MOST_LAYERS)
    if layers > len(tensor_names):
        raise FamilyError(f"{key}: {layers} layers are stated, but the file has only {len(tensor_names)} tensors")
    return layers
