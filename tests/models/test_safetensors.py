"""The safetensors reader: against the safetensors package, sharded models, and headers that lie."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

from octavo.models.safetensors import INDEX_NAME, SINGLE_NAME, SafetensorsError, SafetensorsModel, open_file
from octavo.models.weights import widen
from tests.models.tiny_hf import file_bytes, header_of, safetensors_bytes, stored, write_shards

RNG = np.random.default_rng(0)
ARRAYS = {"F64": "f8", "F32": "f4", "F16": "f2", "I64": "i8", "I32": "i4", "I16": "i2", "I8": "i1", "U8": "u1", "BOOL": "?"}


def small_tensors() -> dict[str, np.ndarray]:
    return {f"t.{i}": RNG.standard_normal((3, 4)).astype(np.float32) for i in range(4)}


@pytest.mark.parametrize("dtype", ARRAYS)
def test_reads_what_the_package_writes(tmp_path, dtype):
    arrays = {"a": (RNG.standard_normal((5, 3)) * 40).astype(ARRAYS[dtype]), "b.c": np.ones((2, 1, 2), ARRAYS[dtype])}
    safetensors.numpy.save_file(arrays, tmp_path / SINGLE_NAME, metadata={"format": "pt"})
    model = SafetensorsModel.open(tmp_path)
    assert model.paths == (tmp_path / SINGLE_NAME,)
    assert set(model.tensors) == set(arrays)
    for name, values in arrays.items():
        tensor = model.tensors[name]
        assert (tensor.dtype, tensor.shape, bytes(tensor.data)) == (dtype.lower(), values.shape, values.tobytes())
        np.testing.assert_array_equal(widen(tensor), values.astype(np.float32))


def test_the_package_reads_what_the_tests_write(tmp_path):
    arrays = small_tensors()
    content = safetensors_bytes({name: stored(values, "F32") for name, values in arrays.items()})
    theirs = safetensors.numpy.load(content)
    assert {name: values.tolist() for name, values in theirs.items()} == {name: values.tolist() for name, values in arrays.items()}


def test_bf16_is_widened_exactly(tmp_path):
    values = np.array([1.0, -3.140625, 1e5, 1e-8, 65504.0 * 4], np.float32)
    (tmp_path / SINGLE_NAME).write_bytes(safetensors_bytes({"w": stored(values, "BF16")}))
    tensor = SafetensorsModel.open(tmp_path).tensors["w"]
    assert tensor.dtype == "bf16"
    np.testing.assert_array_equal(widen(tensor).view(np.uint32), values.view(np.uint32) & 0xFFFF0000)


def test_data_outlives_the_model(tmp_path):
    path = tmp_path / SINGLE_NAME
    path.write_bytes(safetensors_bytes({"w": stored(np.arange(4), "I64")}))
    data = SafetensorsModel.open(tmp_path).tensors["w"].data
    path.unlink()
    assert data.readonly and bytes(data) == np.arange(4).tobytes()


# Headers that lie: each changes the true header of two float32 tensors of 48 bytes, "a" and "b".
def change(name: str, **fields: Any) -> Callable[[dict], None]:
    return lambda header: header[name].update(fields)


LIES: dict[str, tuple[Callable[[dict], Any], str]] = {
    "dimension grew": (change("b", shape=[4, 4]), r"data_offsets of tensor 'b' span 48 bytes, but shape \[4, 4\] of F32 takes 64"),
    "dimension 2^62": (change("b", shape=[2**62, 16]), r"but shape \[4611686018427387904, 16\] of F32 takes 2951"),
    "dimension 2^64": (change("b", shape=[2**64, 0]), "shape of tensor 'b' is"),
    "dimension of 4000 digits": (lambda header: header["b"].update(shape=[10**4000]), "shape of tensor 'b' is"),
    "dimension negative": (change("b", shape=[-3, -4]), r"shape of tensor 'b' is '\[-3, -4\]'"),
    "dimension true": (change("b", shape=[True, 12]), "shape of tensor 'b' is"),
    "dimension fractional": (change("b", shape=[3.0, 4]), "shape of tensor 'b' is"),
    "9 dimensions": (change("b", shape=[3, 4] + [1] * 7), "shape of tensor 'b' is .*; at most 8"),
    "shape missing": (lambda header: header["b"].pop("shape"), "shape of tensor 'b' is 'None'"),
    "offsets beyond the file": (change("b", data_offsets=[2**40, 2**40 + 48]), "'b' begin at 1099511627776, which leaves a gap"),
    "end beyond the file": (change("b", shape=[2**30], data_offsets=[48, 48 + 2**32]), "tensor 'b' ends at offset .* truncated"),
    "offsets overlap": (change("b", data_offsets=[44, 92]), "'b' begin at 44, which overlaps"),
    "the same bytes twice": (change("b", data_offsets=[0, 48]), "begin at 0, which overlaps"),
    "offsets leave a gap": (change("b", data_offsets=[52, 100]), "'b' begin at 52, which leaves a gap"),
    "offsets reversed": (change("b", data_offsets=[96, 48]), "data_offsets of tensor 'b' are"),
    "three offsets": (change("b", data_offsets=[48, 96, 96]), "data_offsets of tensor 'b' are"),
    "offsets negative": (change("b", data_offsets=[-48, 0]), "data_offsets of tensor 'b' are"),
    "tensor left out": (lambda header: header.pop("b"), "the tensors end at offset .*, but the file has"),
    "tensor shrank": (change("b", shape=[2, 4], data_offsets=[48, 80]), "the tensors end at offset .*, but the file has"),
    "unknown dtype": (change("b", dtype="F8_E4M3"), "dtype of tensor 'b' is 'F8_E4M3', which cannot be read; known: F64, F32"),
    "dtype is no text": (change("b", dtype=["F32"]), "dtype of tensor 'b' is"),
    "entry is a list": (lambda header: header.update(b=[1]), "tensor 'b': a name and an object"),
}


def two_tensors() -> tuple[dict[str, Any], bytes]:
    files = {name: stored(np.arange(12.0).reshape(3, 4), "F32") for name in "ab"}
    return header_of(files), b"".join(data for _, _, data in files.values())


@pytest.mark.parametrize("name", LIES)
def test_one_field_that_lies_is_named(tmp_path, name):
    header, data = two_tensors()
    path = tmp_path / SINGLE_NAME
    path.write_bytes(file_bytes(header, data))
    assert set(open_file(path).tensors) == {"a", "b"}
    LIES[name][0](header)
    path.write_bytes(file_bytes(header, data))
    with pytest.raises(SafetensorsError, match=LIES[name][1]) as caught:
        open_file(path)
    assert str(caught.value).startswith(f"{path}: ") and len(str(caught.value)) < 1000


@pytest.mark.parametrize(
    "content,message",
    [
        (b"", "file of 0 bytes is too short"),
        (b"1234567", "file of 7 bytes is too short"),
        (file_bytes(b"{}", b"", 2**63), "header length is 9223372036854775808; the limit is 8"),
        (file_bytes(b"{}", b"", 9), "header length is 9; the limit is 8"),
        (file_bytes(b"", b"", 0), "header is not valid JSON"),
        (file_bytes(b"[]", b""), "header is a JSON list"),
        (file_bytes(b"{'a': 1}", b""), "header is not valid JSON"),
        (file_bytes(b'{"\xff": 1}', b""), "header is not valid JSON"),
        (file_bytes(b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", b""), "header is nested too deep"),
        (file_bytes(b'{"a": ' + b'{"a":' * 100_000, b""), "header is nested too deep"),
        (file_bytes(b'{"a": ' + b"9" * 100_000 + b"}", b""), "header is not valid JSON"),
        (file_bytes(b'{"a": {"dtype": "U8", "dtype": "I8", "shape": [0], "data_offsets": [0, 0]}}', b""), "'dtype' occurs twice in the"),
        (file_bytes(b'{"": {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}}', b""), "tensor '': a name and an object"),
    ],
)
def test_bad_headers_are_refused(tmp_path, content, message):
    path = tmp_path / SINGLE_NAME
    path.write_bytes(content)
    with pytest.raises(SafetensorsError, match=message):
        open_file(path)


def test_duplicate_tensor_name_is_refused(tmp_path):
    header, data = two_tensors()
    text = json.dumps(header).replace('"b"', '"a"').encode()
    path = tmp_path / SINGLE_NAME
    path.write_bytes(file_bytes(text, data))
    with pytest.raises(SafetensorsError, match="'a' occurs twice in the header"):
        open_file(path)


def test_a_header_longer_than_the_limit_is_refused(tmp_path):
    """The limit holds even where the file is long enough; a sparse file stands for it."""
    path = tmp_path / SINGLE_NAME
    with open(path, "wb") as file:
        file.write((100_000_001).to_bytes(8, "little"))
        file.truncate(200_000_000)
    with pytest.raises(SafetensorsError, match="header length is 100000001; the limit is 100000000"):
        open_file(path)


def test_every_truncation_and_extension_is_refused(tmp_path):
    whole = file_bytes(*two_tensors())
    path = tmp_path / SINGLE_NAME
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        with pytest.raises(SafetensorsError):
            open_file(path)
    path.write_bytes(whole + b"\0")
    with pytest.raises(SafetensorsError, match="the tensors end at offset"):
        open_file(path)


# Sharded models.
SHARD_1, SHARD_2 = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


@pytest.fixture
def sharded(tmp_path) -> tuple[Path, dict[str, np.ndarray]]:
    arrays = small_tensors()
    write_shards(tmp_path, {name: stored(values, "F32") for name, values in arrays.items()}, 2)
    return tmp_path, arrays


def edit_index(folder: Path, edit: Callable[[dict[str, Any]], Any]) -> None:
    index = json.loads((folder / INDEX_NAME).read_text())
    edit(index)
    (folder / INDEX_NAME).write_text(json.dumps(index))


def refused(folder: Path, message: str) -> None:
    with pytest.raises(SafetensorsError, match=message):
        SafetensorsModel.open(folder)


def test_shards_are_one_model(sharded):
    folder, arrays = sharded
    model = SafetensorsModel.open(folder)
    assert {path.name for path in model.paths} == {SHARD_1, SHARD_2} and len(model.headers) == 2
    assert set(model.tensors) == set(arrays)
    for name, values in arrays.items():
        np.testing.assert_array_equal(widen(model.tensors[name]), values)


def test_stray_files_are_not_read(sharded):
    folder, arrays = sharded
    others = {name: stored(values + 1, "F32") for name, values in arrays.items()}
    (folder / "old.safetensors").write_bytes(safetensors_bytes(others))
    (folder / "aaa.safetensors").write_bytes(b"not safetensors at all")
    (folder / "x.safetensors").mkdir()
    for name, values in arrays.items():
        np.testing.assert_array_equal(widen(SafetensorsModel.open(folder).tensors[name]), values)


def test_missing_shard_is_named(sharded):
    folder, _ = sharded
    (folder / SHARD_2).unlink()
    refused(folder, f"names {SHARD_2}, which is not there")


def test_truncated_shard_is_named(sharded):
    folder, _ = sharded
    (folder / SHARD_2).write_bytes((folder / SHARD_2).read_bytes()[:-1])
    refused(folder, f"{SHARD_2}: tensor 't.3' ends at offset .* truncated")


def test_shard_that_is_a_folder_is_named(sharded):
    folder, _ = sharded
    (folder / SHARD_2).unlink()
    (folder / SHARD_2).mkdir()
    refused(folder, f"{SHARD_2}: a folder, where a file is needed")


def test_only_an_index_is_refused(sharded):
    folder, _ = sharded
    (folder / SHARD_1).unlink()
    (folder / SHARD_2).unlink()
    refused(folder, f"names {SHARD_1}, {SHARD_2}, which are not there")


def test_empty_folder_and_folder_named_like_the_file_are_refused(tmp_path):
    refused(tmp_path, f"holds neither {SINGLE_NAME} nor {INDEX_NAME}")
    (tmp_path / "x.safetensors").mkdir()
    refused(tmp_path, f"holds neither {SINGLE_NAME} nor {INDEX_NAME}")
    (tmp_path / SINGLE_NAME).mkdir()
    refused(tmp_path, f"{SINGLE_NAME}: a folder, where a file is needed")


def test_tensor_that_the_index_omits_is_refused(sharded):
    folder, _ = sharded
    edit_index(folder, lambda index: index["weight_map"].pop("t.2"))
    refused(folder, rf"{SHARD_1}: tensor 't\.2' is in the file, but .* does not list it there")


def test_tensor_that_only_the_index_has_is_refused(sharded):
    folder, _ = sharded
    edit_index(folder, lambda index: index["weight_map"].update({"t.9": SHARD_1}))
    refused(folder, rf"{SHARD_1}: tensor 't\.9' is missing")


def test_tensor_in_another_shard_than_the_index_says_is_refused(sharded):
    folder, _ = sharded
    edit_index(folder, lambda index: index["weight_map"].update({"t.0": SHARD_2}))
    refused(folder, rf"{SHARD_2}: tensor 't\.0' is missing")


@pytest.mark.parametrize("name", ["../old.safetensors", "/etc/passwd", "sub/x.safetensors", "x.bin", "", None, 3, "..", ".safetensors/.."])
def test_index_may_not_name_other_places(sharded, name):
    folder, _ = sharded
    edit_index(folder, lambda index: index["weight_map"].update({"t.0": name}))
    refused(folder, r"weight_map puts 't\.0' into .*; a \.safetensors file of the same folder is needed")


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": {}}', '{"weight_map": []}', '{"weight_map": {"a": "x", "a": "y"}}'])
def test_bad_index_is_refused(sharded, text):
    folder, _ = sharded
    (folder / INDEX_NAME).write_text(text)
    refused(folder, INDEX_NAME)


def test_index_and_a_single_file_that_it_does_not_name_are_refused(sharded):
    folder, _ = sharded
    (folder / SINGLE_NAME).write_bytes(file_bytes(*two_tensors()))
    refused(folder, f"holds {SINGLE_NAME} as well as {INDEX_NAME}")
    for shard in (SHARD_1, SHARD_2):
        (folder / shard).unlink()
    edit_index(folder, lambda index: index.update(weight_map={"a": SINGLE_NAME, "b": SINGLE_NAME}))
    assert set(SafetensorsModel.open(folder).tensors) == {"a", "b"}
