"""Files whose sizes lie: each is one clean error that names the field, fast, small, and with ``python -O`` as well."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
import tracemalloc
from collections.abc import Callable

import pytest

from octavo.models.gguf import GGUFError, GGUFFile
from tests.models.gguf_bytes import ARRAY, F32, STRING, U32, GGUFBytes, Tensor, array, scalar, string

Lie = Callable[[GGUFBytes], None]


def setting(**fields) -> Lie:
    return lambda content: [setattr(content, name, value) for name, value in fields.items()] and None


def pair(key: str | bytes, value: bytes) -> Lie:
    return lambda content: content.pairs.append((key, value))


def tensor(index: int, **fields) -> Lie:
    return lambda content: [setattr(content.tensors[index], name, value) for name, value in fields.items()] and None


def nested(depth: int) -> bytes:
    return struct.pack("<I", ARRAY) + struct.pack("<IQ", ARRAY, 1) * depth + struct.pack("<IQI", U32, 1, 7)


SHAPE_A = r"dimensions .* of tensor 'a\.weight' take"
BLOCK_A = r"dimension 0 of tensor 'a\.weight' is"
LIES: dict[str, tuple[Lie, str]] = {
    "number of pairs 2^40": (setting(num_pairs=2**40), "number of metadata pairs is 1099511627776, but .* hold at most"),
    "number of tensors 2^63": (setting(num_tensors=2**63), "number of tensors is 9223372036854775808, but .* hold at most"),
    "number of tensors 2^64-1": (setting(num_tensors=2**64 - 1), "number of tensors is 18446744073709551615"),
    "string length 2^31": (pair("s", struct.pack("<I", STRING) + string("x", 2**31)), "length of value of 's' is 2147483648, but"),
    "string length 2^64-1": (pair("s", struct.pack("<I", STRING) + string("x", 2**64 - 1)), "length of value of 's' is 18446744073"),
    "array of 2^40 strings": (pair("s", array(STRING, ["x"], 2**40)), "length of array 's' is 1099511627776, but .* hold at most"),
    "array of 2^62 floats": (pair("s", array(F32, [1.0], 2**62)), "length of array 's' is 4611686018427387904, but"),
    "array of more strings than there are": (pair("s", array(STRING, ["x"] * 9, 20)), "'s'"),
    "string in an array of length 2^63": (
        pair("s", struct.pack("<IIQ", ARRAY, STRING, 2) + string("x", 2**63) + string("y")),
        "'s' has 2 strings, but the file ends in number 1",
    ),
    "last string in an array of length 2^31": (
        pair("s", struct.pack("<IIQ", ARRAY, STRING, 1) + string("x", 2**31)),
        "'s': its last string ends at offset .*, past the file's",
    ),
    "array nested 1000 deep": (pair("s", nested(1000)), "'s' is an array of arrays"),
    "array of unknown type": (pair("s", struct.pack("<IIQ", ARRAY, 13, 1)), "element type of array 's' is 13"),
    "value of unknown type": (pair("s", struct.pack("<II", 77, 1)), "type of 's' is 77"),
    "boolean of 2": (pair("s", struct.pack("<IB", 7, 2)), "value of 's' is 2; a boolean is 0 or 1"),
    "value that is not UTF-8": (pair("s", scalar(STRING, b"\xff\xfe")), "value of 's' at offset .* is not valid UTF-8"),
    "no dimensions": (tensor(0, num_dims=0, dims=[]), r"number of dimensions of tensor 'a\.weight' is 0; from 1 to 4"),
    "5 dimensions": (tensor(0, dims=[2, 2, 2, 2, 2]), r"number of dimensions of tensor 'a\.weight' is 5; from 1 to 4"),
    "2^32-1 dimensions": (tensor(0, num_dims=2**32 - 1), r"number of dimensions of tensor 'a\.weight' is 4294967295"),
    "dimension 0": (tensor(0, dims=[8, 0]), r"dimension 1 of tensor 'a\.weight' is 0; at least 1"),
    "dimension 2^42+1": (tensor(0, dims=[2**42 + 1]), SHAPE_A + " 17592186044420 bytes, but the whole"),
    "dimensions whose product wraps to 0": (tensor(0, dims=[2**63, 2]), SHAPE_A + " 73786976294838206464 bytes"),
    "dimensions whose bytes wrap to 16": (tensor(0, dims=[2**62 + 4, 1]), SHAPE_A),
    "row that is no whole number of blocks": (tensor(0, dims=[33, 1], type_number=2), BLOCK_A + " 33; Q4_0 needs"),
    "rows that only together fill blocks": (tensor(0, dims=[16, 2], type_number=2), BLOCK_A + " 16; Q4_0 needs"),
    "alignment 0": (pair("general.alignment", scalar(U32, 0)), "general.alignment is 0; a power of two"),
    "alignment 3": (pair("general.alignment", scalar(U32, 3)), "general.alignment is 3; a power of two"),
    "alignment 2^30": (pair("general.alignment", scalar(U32, 2**30)), "general.alignment is 1073741824; a power of two"),
    "alignment of string type": (pair("general.alignment", scalar(STRING, "32")), "general.alignment is '32'; a power of two"),
    "alignment of boolean type": (pair("general.alignment", scalar(7, 1)), "general.alignment is True; a power of two"),
    "alignment of array type": (pair("general.alignment", array(U32, [32])), r"general.alignment is \(32,\); a power of two"),
    "offset beyond the file": (tensor(2, offset=2**40), r"offset of tensor 'c\.weight' is 1099511627776, which leaves a gap"),
    "offset 2^64-32": (tensor(2, offset=2**64 - 32), r"offset of tensor 'c\.weight' is 18446744073709551584"),
    "offset unaligned": (tensor(1, offset=130), r"offset of tensor 'b\.weight' is 130, not a multiple of the alignment 32"),
    "offset overlapping another": (tensor(1, offset=0), r"offset of tensor 'b\.weight' is 0, which overlaps the tensor before it"),
    "tensor that grew": (tensor(2, dims=[64], num_bytes=128), r"tensor 'c\.weight' of 256 bytes ends at offset .* past the file's"),
    "tensor that shrank": (tensor(0, dims=[8, 1], num_bytes=128), r"offset of tensor 'b\.weight' is 128, which leaves a gap"),
    "duplicate key": (pair("flag", scalar(U32, 1)), "metadata key 'flag' occurs twice"),
    "duplicate tensor name": (tensor(1, name="a.weight"), r"tensor name 'a\.weight' occurs twice"),
    "empty key": (pair("", scalar(U32, 1)), "length of metadata key 7 is 0; from 1 to 65535"),
    "key of 70000 bytes": (pair("k" * 70_000, scalar(U32, 1)), "length of metadata key 7 is 70000; from 1 to 65535"),
    "empty tensor name": (tensor(0, name=""), "length of name of tensor 0 is 0; from 1 to 65535"),
    "tensor name that is not UTF-8": (tensor(0, name=b"\xff"), "name of tensor 0 at offset .* is not valid UTF-8"),
    "wrong magic": (setting(magic=b"GGML"), "starts with b'GGML'"),
    "version 0": (setting(version=0), "version is 0; versions 2 and 3"),
    "version 1": (setting(version=1), "version is 1; versions 2 and 3"),
    "version 4": (setting(version=4), "version is 4; versions 2 and 3"),
    "big-endian file": (setting(version=3 << 24), "big-endian"),
}


def lying_file(name: str) -> bytes:
    content = GGUFBytes()
    LIES[name][0](content)
    return content.build()


def test_the_file_is_good_before_a_field_is_changed(tmp_path):
    path = tmp_path / "good.gguf"
    path.write_bytes(GGUFBytes().build())
    file = GGUFFile.open(path)
    assert path.stat().st_size < 1500 and len(file.tensors) == 3 and len(dict(file.metadata)) == 7


@pytest.mark.parametrize("name", LIES)
def test_one_field_that_lies_is_named(tmp_path, name):
    path = tmp_path / "lie.gguf"
    path.write_bytes(lying_file(name))
    with pytest.raises(GGUFError, match=LIES[name][1]) as caught:
        GGUFFile.open(path)
    assert str(caught.value).startswith(f"{path}: ") and len(str(caught.value)) < 1000


def test_key_length_past_the_file(tmp_path):
    content = GGUFBytes().build()
    path = tmp_path / "lie.gguf"
    path.write_bytes(content[:24] + struct.pack("<Q", 2**31) + content[32:])
    with pytest.raises(GGUFError, match="length of metadata key 0 is 2147483648, but"):
        GGUFFile.open(path)


CHILD = """
import json, resource, sys, time
from octavo.models.gguf import GGUFError, GGUFFile
assert False, "python -O must be in force"
pages = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (pages + (64 << 20),) * 2)
out = {}
for path in sys.argv[1:]:
    start = time.process_time()
    try:
        GGUFFile.open(path)
        result = "opened"
    except GGUFError as exc:
        result = "refused"
    out[path] = (result, time.process_time() - start)
print(json.dumps(out))
"""


def test_lies_are_refused_by_python_o_in_little_memory_and_time(tmp_path):
    """Less than 1 s of processor time (it takes a millisecond) and 64 MB beyond the interpreter each, with assertions compiled away."""
    paths = []
    for i, name in enumerate(LIES):
        paths.append(tmp_path / f"{i}.gguf")
        paths[-1].write_bytes(lying_file(name))
    run = subprocess.run([sys.executable, "-O", "-c", CHILD, *map(str, paths)], capture_output=True, text=True, timeout=120, env=os.environ)
    assert run.returncode == 0, run.stderr
    results = json.loads(run.stdout)
    for path, name in zip(paths, LIES, strict=True):
        result, seconds = results[str(path)]
        assert result == "refused", name
        assert seconds < 1.0, name


def test_every_truncation_is_refused(tmp_path):
    content = GGUFBytes()
    content.tensors = [Tensor("a.weight", [8, 4]), Tensor("c.weight", [32])]  # the last ends with the file, without padding
    whole = content.build()
    path = tmp_path / "cut.gguf"
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        with pytest.raises(GGUFError):
            GGUFFile.open(path)


def test_array_whose_length_is_all_that_is_wanted_is_not_parsed(tmp_path):
    """Ten million values: opening and asking for the length must not make them."""
    count = 10_000_000
    content = GGUFBytes()
    content.pairs.append(("scores", struct.pack("<IIQ", ARRAY, F32, count) + bytes(4 * count)))
    content.pairs = content.pairs[-1:]
    path = tmp_path / "big.gguf"
    path.write_bytes(content.build())
    tracemalloc.start()
    assert GGUFFile.open(path).metadata.array_length("scores") == count
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1 << 20


def test_what_is_no_file_is_refused(tmp_path):
    fifo = tmp_path / "fifo.gguf"
    os.mkfifo(fifo)
    for path, why in [(tmp_path, "a folder"), (fifo, "not a regular file"), (tmp_path / "none.gguf", "No such file")]:
        with pytest.raises(GGUFError, match=why):
            GGUFFile.open(path)
    empty = tmp_path / "empty.gguf"
    empty.touch()
    with pytest.raises(GGUFError, match="file of 0 bytes is too short"):
        GGUFFile.open(empty)
