"""KV of the reference backend on its way to another: copies between its pool and a caller's buffer, and which steps are through.

Owns the count of steps; never a block. On the wire a layer of a block is its keys, then its values, float32
[block_size, kv_heads, head_dim]; packed, of each the int8 codes, then the float32 scales.
"""

from __future__ import annotations

import threading
from array import array

import numpy as np

from octavo.backends.kv_wire import Buffer
from octavo.backends.reference.host_pool import Layers, pack, unpack
from octavo.core.kv_pages import PageLayout


class StepCount:
    """Steps that are through. Rows run one by one through all layers here: so no layer is written before the step is."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._num_done = 0

    @property
    def next_step(self) -> int:
        return self._num_done + 1

    def done(self) -> None:
        with self._changed:
            self._num_done += 1
            self._changed.notify_all()

    def wait(self, step: int, timeout_s: float) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: self._num_done >= step, timeout_s)


def layer_bytes(layers: Layers, layer: int, packed: bool) -> int:
    if not 0 <= layer < len(layers):
        raise ValueError(f"KV layer {layer}: layers are 0 to {len(layers) - 1}")
    keys = layers[layer][0][0]
    return 2 * (keys.size + 4 * (keys.size // keys.shape[-1]) if packed else 4 * keys.size)


def export_kv(pool: Layers, layout: PageLayout, layers: range, pages: array[int], to: Buffer, packed: bool) -> None:
    out, at = _checked(pool, layout, layers, pages, to, packed), 0
    for layer in layers:
        for page in _pages_of(layout, layer, pages):
            for values in (pool[layer][0][page], pool[layer][1][page]):
                parts: tuple[np.ndarray, ...] = pack(values) if packed else (values,)
                for part in parts:
                    out[at : at + part.nbytes] = np.ascontiguousarray(part).reshape(-1).view(np.uint8)
                    at += part.nbytes


def import_kv(pool: Layers, layout: PageLayout, layers: range, pages: array[int], data: Buffer, packed: bool) -> None:
    given, at = _checked(pool, layout, layers, pages, data, packed), 0

    def take(dtype: type, shape: tuple[int, ...]) -> np.ndarray:
        nonlocal at
        part: np.ndarray = np.frombuffer(given, dtype, int(np.prod(shape)), at).reshape(shape)
        at += part.nbytes
        return part

    for layer in layers:
        for page in _pages_of(layout, layer, pages):
            for values in (pool[layer][0][page], pool[layer][1][page]):
                if packed:
                    codes = take(np.int8, values.shape)
                    values[...] = unpack(codes, take(np.float32, values.shape[:-1]))
                else:
                    values[...] = take(np.float32, values.shape)


def _checked(pool: Layers, layout: PageLayout, layers: range, pages: array[int], buffer: Buffer, packed: bool) -> np.ndarray:
    """``buffer`` as bytes [size]; ValueError for layers or pages that there are not, or another size."""
    if layers.step != 1 or not 0 <= layers.start < layers.stop <= len(pool) or len(pages) % layout.num_pages:
        limit = f"some of the {len(pool)} layers, and {layout.num_pages} pages to a block"
        raise ValueError(f"KV layers {layers} of {len(pages)} pages: {limit}")
    for layer in layers:
        for page in _pages_of(layout, layer, pages):
            if not 0 <= page < len(pool[layer][0]):
                raise ValueError(f"KV page {page} of layer {layer}: pages are 0 to {len(pool[layer][0]) - 1}")
    data = np.frombuffer(buffer, np.uint8)
    wanted = len(pages) // layout.num_pages * sum(layer_bytes(pool, layer, packed) for layer in layers)
    if len(data) != wanted:
        raise ValueError(f"KV: {len(data)} bytes are given, and these blocks have {wanted}")
    return data


def _pages_of(layout: PageLayout, layer: int, pages: array[int]) -> array[int]:
    return pages[layout.layers[layer][0] :: layout.num_pages]
