"""Damaged model files, made from good tiny ones: truncated, with flipped bits, or with one size that lies; seeded.

``model_mutants`` makes them, ``run_in_child`` opens and runs them in a child process under a memory limit. Used by the short test of every
run and by the long one of the soak target.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tests.models.tiny import MIN_VOCAB, write_tiny_gguf
from tests.models.tiny_hf import write_tiny_hf

LIES = (0, 1, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**62, 2**63, 2**64 - 1)
_SCALAR_BYTES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_SMALL = {"layers": 1, "hidden": 32, "heads": 2, "kv_heads": 1, "ffn": 32, "vocab": MIN_VOCAB + 5}
_K_SIZES = {"layers": 1, "hidden": 256, "heads": 4, "kv_heads": 2, "ffn": 256, "vocab": MIN_VOCAB + 5, "tied": True}


@dataclass(frozen=True, slots=True)
class Base:
    """A good model: its folder, the file of it that is damaged, and that file's bytes. ``path`` is what is opened."""

    path: Path
    file: Path
    content: bytes

    @property
    def is_gguf(self) -> bool:
        return self.file.suffix == ".gguf"


@dataclass(frozen=True, slots=True)
class Mutant:
    base: Base
    what: str  # how it was damaged, for messages
    content: bytes
    must_fail: bool  # a truncation or a size that lies; flipped bits may leave a model that works


@dataclass(frozen=True, slots=True)
class SizeField:
    """A number in a GGUF file that says how much of something follows, or where it lies."""

    name: str
    offset: int
    num_bytes: int


def write_bases(folder: Path) -> list[Base]:
    """Good models of both formats, small enough to run in a few milliseconds."""
    paths = [
        write_tiny_gguf(folder / "f32.gguf", tensor_type="F32", **_SMALL),
        write_tiny_gguf(folder / "q8.gguf", "qwen2", tensor_type="Q8_0", **_SMALL),
        write_tiny_gguf(folder / "q4k.gguf", tensor_type="Q4_K", **_K_SIZES),
        write_tiny_hf(folder / "hf", dtype="BF16", **_SMALL),
    ]
    files = [path / "model.safetensors" if path.is_dir() else path for path in paths]
    return [Base(path, file, file.read_bytes()) for path, file in zip(paths, files, strict=True)]


def model_mutants(bases: list[Base], count: int, seed: int) -> Iterator[Mutant]:
    """``count`` damaged files: of each base in turn, of each kind in turn."""
    rng = np.random.default_rng(seed)
    fields = {base.file: gguf_size_fields(base.content) for base in bases if base.is_gguf}
    kinds = (truncated, flipped, lying)
    for i in range(count):
        base = bases[i % len(bases)]
        yield kinds[i // len(bases) % len(kinds)](base, rng, fields.get(base.file, []))


def truncated(base: Base, rng: np.random.Generator, fields: list[SizeField]) -> Mutant:
    """Half of them are cut inside the header. Every base's last tensor ends with its file, so each byte is missed."""
    limit = header_bytes(base, fields) if rng.integers(2) else len(base.content)
    size = int(rng.integers(limit))
    return Mutant(base, f"cut from {len(base.content)} to {size} bytes", base.content[:size], must_fail=True)


def flipped(base: Base, rng: np.random.Generator, fields: list[SizeField]) -> Mutant:
    """One to eight bits, two times of three in the header."""
    limit = header_bytes(base, fields) if rng.integers(3) else len(base.content)
    content = bytearray(base.content)
    bits = [int(bit) for bit in rng.integers(limit * 8, size=int(rng.integers(1, 9)))]
    for bit in bits:
        content[bit // 8] ^= 1 << bit % 8
    return Mutant(base, f"bits {bits} flipped", bytes(content), must_fail=False)


def lying(base: Base, rng: np.random.Generator, fields: list[SizeField]) -> Mutant:
    return _lying_gguf(base, rng, fields) if base.is_gguf else _lying_safetensors(base, rng)


def _lie(value: int, rng: np.random.Generator, num_bits: int) -> int:
    """Another number than ``value``: near it, or one of the values that overflow something."""
    near = [value + 1, value - 1, value * 2, value // 2, value + 8]
    choices = [n for n in (*near, *LIES) if n != value and 0 <= n < 1 << num_bits]
    return choices[int(rng.integers(len(choices)))]


def _lying_gguf(base: Base, rng: np.random.Generator, fields: list[SizeField]) -> Mutant:
    field = fields[int(rng.integers(len(fields)))]
    end = field.offset + field.num_bytes
    value = int.from_bytes(base.content[field.offset : end], "little")
    lie = _lie(value, rng, 8 * field.num_bytes)
    content = base.content[: field.offset] + lie.to_bytes(field.num_bytes, "little") + base.content[end:]
    return Mutant(base, f"{field.name} says {lie}, not {value}", content, must_fail=True)


def _lying_safetensors(base: Base, rng: np.random.Generator) -> Mutant:
    header_length = int.from_bytes(base.content[:8], "little")
    header, data = json.loads(base.content[8 : 8 + header_length]), base.content[8 + header_length :]
    if not rng.integers(5):
        lie = _lie(header_length, rng, 64)
        return Mutant(base, f"header length says {lie}, not {header_length}", lie.to_bytes(8, "little") + base.content[8:], must_fail=True)
    names = [name for name in header if name != "__metadata__"]
    name = names[int(rng.integers(len(names)))]
    numbers = header[name]["data_offsets" if rng.integers(2) else "shape"]
    at = int(rng.integers(len(numbers)))
    value, numbers[at] = numbers[at], _lie(numbers[at], rng, 64)
    text = json.dumps(header).encode()
    return Mutant(base, f"{name} {header[name]}, not {value}", len(text).to_bytes(8, "little") + text + data, must_fail=True)


def header_bytes(base: Base, fields: list[SizeField]) -> int:
    """Where the header of a good file ends, near enough."""
    return fields[-1].offset + 8 if base.is_gguf else 8 + int.from_bytes(base.content[:8], "little")


class _Walk:
    """Walks a good file, and so checks nothing; it shares no code with the reader under test."""

    def __init__(self, content: bytes) -> None:
        self.content, self.pos = content, 8
        self.fields: list[SizeField] = []

    def number(self, num_bytes: int, name: str | None = None) -> int:
        if name is not None:
            self.fields.append(SizeField(name, self.pos, num_bytes))
        self.pos += num_bytes
        return int.from_bytes(self.content[self.pos - num_bytes : self.pos], "little")

    def string(self, name: str) -> str:
        length = self.number(8, f"length of {name}")
        self.pos += length
        return self.content[self.pos - length : self.pos].decode()

    def value(self, kind: int, name: str) -> None:
        if kind == 8:
            self.string(name)
        elif kind == 9:
            inner = self.number(4)
            for i in range(self.number(8, f"length of array {name}")):
                self.value(inner, f"{name}[{i}]")
        else:
            self.pos += _SCALAR_BYTES[kind]


def gguf_size_fields(content: bytes) -> list[SizeField]:
    """Every count, length, dimension and offset of a good GGUF file, in order. Of the strings of an array only every 16th."""
    walk = _Walk(content)
    num_tensors, num_pairs = walk.number(8, "number of tensors"), walk.number(8, "number of pairs")
    for _ in range(num_pairs):
        key = walk.string("a key")
        walk.value(walk.number(4), key)
    for _ in range(num_tensors):
        name = walk.string("a tensor name")
        for i in range(walk.number(4, f"number of dimensions of {name}")):
            walk.number(8, f"dimension {i} of {name}")
        walk.number(4)
        walk.number(8, f"offset of {name}")
    in_arrays = [field for field in walk.fields if field.name.startswith("length of ") and field.name.endswith("]")]
    skipped = {field.offset for i, field in enumerate(in_arrays) if i % 16}
    return [field for field in walk.fields if field.offset not in skipped]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a mutant: "runs", "refused" (a ModelFileError or BackendError), or what it must not do; and why."""

    mutant: Mutant
    result: str
    detail: str
    seconds: float

    @property
    def is_good(self) -> bool:
        return self.result == "refused" or (self.result == "runs" and not self.mutant.must_fail)


def run_in_child(
    bases: list[Base], mutants: Iterator[Mutant], headroom_bytes: int, timeout_s: float, backend: str = "reference"
) -> list[Outcome]:
    """Open each mutant and run it on ``backend``, in one child process that may use ``headroom_bytes`` of address space more than the
    good models needed.

    A child that dies or hangs ends the run: the mutant it was at is the last outcome, with the result "crashed" or "hung".
    """
    arguments = [backend, str(headroom_bytes), str(timeout_s), *(str(base.path) for base in bases)]
    one_arena = {"MALLOC_ARENA_MAX": "1", "OPENBLAS_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    child = subprocess.Popen(
        [sys.executable, "-m", "tests.models.fuzz_child", *arguments],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2], env=os.environ | one_arena,
    )  # fmt: skip
    outcomes: list[Outcome] = []
    with child:
        if not _answer(child):
            raise RuntimeError("the child could not run the good models")
        for mutant in mutants:
            mutant.base.file.write_bytes(mutant.content)
            answer = _answer(child, f"{mutant.base.path}\n")
            mutant.base.file.write_bytes(mutant.base.content)
            if not answer:
                status = child.wait()
                outcomes.append(Outcome(mutant, "hung" if status == -signal.SIGALRM else "crashed", f"exit status {status}", 0.0))
                break
            outcomes.append(Outcome(mutant, **json.loads(answer)))
    return outcomes


def _answer(child: subprocess.Popen[str], line: str = "") -> str:
    """The child's next line, after ``line`` was sent; empty when it is gone."""
    assert child.stdin is not None and child.stdout is not None
    try:
        child.stdin.write(line)
        child.stdin.flush()
    except BrokenPipeError:
        return ""
    return child.stdout.readline()
