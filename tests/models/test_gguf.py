"""The GGUF reader against the gguf package, on files that tell the truth. Files that lie are in test_gguf_untrusted.py."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import gguf
import numpy as np
import pytest

from octavo.models.gguf import GGUFError, GGUFFile
from octavo.models.weights import widen
from tests.models.gguf_bytes import BOOL, F64, I8, I16, I32, I64, STRING, U8, U16, U64, GGUFBytes, array, scalar
from tests.models.tiny import write_tiny_gguf


def write(path, content: bytes):
    path.write_bytes(content)
    return path


def field_value(field: gguf.ReaderField):
    value = field.contents()
    return tuple(value) if isinstance(value, list) else value


@pytest.mark.parametrize(
    "arch,tensor_type,sizes",
    [("llama", "F32", {}), ("qwen2", "Q8_0", {}), ("gemma3", "Q4_K", {"hidden": 256, "ffn": 256}), ("llama", "BF16", {"tied": True})],
)
def test_agrees_with_the_gguf_package(tmp_path, arch, tensor_type, sizes):
    path = write_tiny_gguf(tmp_path / "m.gguf", arch, tensor_type=tensor_type, **sizes)
    file, oracle = GGUFFile.open(path), gguf.GGUFReader(path)
    expected = {key: field_value(field) for key, field in oracle.fields.items() if not key.startswith("GGUF.")}
    assert dict(file.metadata) == expected
    assert list(file.tensors) == [t.name for t in oracle.tensors]
    for theirs in oracle.tensors:
        ours = file.tensors[theirs.name]
        assert ours.dtype == theirs.tensor_type.name.lower()
        assert ours.shape == tuple(reversed(theirs.shape.tolist()))
        assert bytes(ours.data) == theirs.data.tobytes()
        np.testing.assert_array_equal(widen(ours), gguf.quants.dequantize(theirs.data, theirs.tensor_type).reshape(ours.shape))


def test_every_value_type_and_version_2(tmp_path):
    values = {U8: 255, I8: -128, U16: 65535, I16: -32768, I32: -(2**31), U64: 2**64 - 1, I64: -(2**63), F64: 1e300, BOOL: 0, STRING: "ü\n"}
    pairs = [(f"k{kind}", scalar(kind, value)) for kind, value in values.items()]
    pairs += [(f"a{kind}", array(kind, [value, value])) for kind, value in values.items()] + [("empty", array(STRING, []))]
    file = GGUFFile.open(write(tmp_path / "v.gguf", GGUFBytes(pairs=pairs, version=2).build()))
    assert file.version == 2
    for kind, value in values.items():
        assert file.metadata[f"k{kind}"] == value
        assert file.metadata[f"a{kind}"] == (value, value)
    assert file.metadata["k7"] is False and file.metadata["a7"] == (False, False)
    assert file.metadata["empty"] == ()


def test_arrays_are_parsed_when_asked_for_and_kept(tmp_path):
    file = GGUFFile.open(write(tmp_path / "v.gguf", GGUFBytes().build()))
    assert file.metadata.array_length("tokens") == 4
    assert file.metadata.array_length("flag") is None and file.metadata.array_length("nothing") is None
    assert file.metadata["tokens"] == ("a", "bb", "", "ü")
    assert file.metadata["tokens"] is file.metadata["tokens"]
    assert file.metadata["flags"] == (True, False)
    assert "tokens" in file.metadata and "nothing" not in file.metadata and len(file.metadata) == 7
    with pytest.raises(KeyError):
        file.metadata["nothing"]


def test_string_in_an_array_that_is_no_text_stays_bytes(tmp_path):
    pairs = [("tokens", array(STRING, ["a", b"\xff", "\u0101"]))]
    file = GGUFFile.open(write(tmp_path / "v.gguf", GGUFBytes(pairs=pairs).build()))
    assert file.metadata["tokens"] == ("a", b"\xff", "\u0101")


def test_alignment_of_the_file_is_used(tmp_path):
    content = GGUFBytes(alignment=8)
    content.pairs.append(("general.alignment", scalar(4, 8)))
    file = GGUFFile.open(write(tmp_path / "v.gguf", content.build()))
    assert bytes(file.tensors["b.weight"].data) == bytes(range(20))


def test_data_outlives_the_file_object(tmp_path):
    path = write(tmp_path / "v.gguf", GGUFBytes().build())
    data = GGUFFile.open(path).tensors["a.weight"].data
    path.unlink()
    assert data.readonly and bytes(data) == bytes(range(128))


def test_plain_integer_and_f64_tensors_are_read(tmp_path):
    extra = {"i": np.array([[1, -2], [3, 4]], np.int64), "d": np.array([0.1, 2.0])}
    extra |= {"b": np.array([-7], np.int8), "s": np.array([9], np.int16)}
    path = write_tiny_gguf(tmp_path / "m.gguf", tensors=extra)
    tensors = GGUFFile.open(path).tensors
    assert [tensors[n].dtype for n in extra] == ["i64", "f64", "i8", "i16"]
    for name, values in extra.items():
        np.testing.assert_array_equal(widen(tensors[name]), values.astype(np.float32))


def test_opening_needs_no_numpy(tmp_path):
    path = write_tiny_gguf(tmp_path / "m.gguf")
    code = "import sys; from octavo.models import gguf; dict(gguf.GGUFFile.open(sys.argv[1]).metadata); sys.exit('numpy' in sys.modules)"
    subprocess.run([sys.executable, "-c", code, str(path)], check=True, timeout=60)


@pytest.mark.parametrize("number,name", [(16, "IQ2_XXS"), (9, "Q8_1"), (39, "MXFP4"), (4, "Q4_2"), (1000, "UNKNOWN")])
def test_a_type_that_cannot_be_read_is_named_with_the_known_ones(tmp_path, number, name):
    content = GGUFBytes()
    content.tensors[1].type_number = number
    with pytest.raises(GGUFError, match=rf"v\.gguf: type of tensor 'b\.weight' is {number} \({name}\).*known: F32, F16, Q4_0.*Q6_K"):
        GGUFFile.open(write(tmp_path / "v.gguf", content.build()))


def split_model(tmp_path, parts: int = 3):
    """A tiny model in ``parts`` files, as llama.cpp's splitter writes them: all metadata in the first, split.* in each."""
    whole = GGUFFile.open(write_tiny_gguf(tmp_path / "whole.gguf", layers=parts))
    names = list(whole.tensors)
    paths = [tmp_path / f"m-{no:05d}-of-{parts:05d}.gguf" for no in range(1, parts + 1)]
    for no, path in enumerate(paths):
        write_part(path, whole, names[no::parts], no, parts, len(names))
    return whole, paths


def write_part(path, whole, names, no, count, total, metadata=None):
    writer = gguf.GGUFWriter(str(path), "llama")
    if no == 0:
        for key, value in whole.metadata.items():
            if key != "general.architecture" and isinstance(value, str):
                writer.add_string(key, value)
            elif isinstance(value, tuple):
                writer.add_array(key, list(value))
    writer.add_uint16("split.no", no)
    writer.add_uint16("split.count", count)
    writer.add_int32("split.tensors.count", total)
    for key, value in (metadata or {}).items():
        writer.add_string(key, value)
    for name in names:
        writer.add_tensor(name, widen(whole.tensors[name]))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_split_model_is_one_model(tmp_path):
    whole, paths = split_model(tmp_path)
    joined = GGUFFile.open(paths[0])
    assert joined.paths == tuple(paths) and len(joined.headers) == 3
    assert set(joined.tensors) == set(whole.tensors)
    for name, tensor in whole.tensors.items():
        assert bytes(joined.tensors[name].data) == bytes(tensor.data)
    assert joined.metadata["tokenizer.ggml.tokens"] == whole.metadata["tokenizer.ggml.tokens"]


def test_split_part_that_is_not_there_is_named(tmp_path):
    _, paths = split_model(tmp_path)
    paths[1].unlink()
    with pytest.raises(GGUFError, match=r"split\.count is 3, but m-00002-of-00003\.gguf is not there"):
        GGUFFile.open(paths[0])


def test_split_part_other_than_the_first_is_refused_by_name(tmp_path):
    _, paths = split_model(tmp_path)
    with pytest.raises(GGUFError, match=r"is not the first part.*open m-00001-of-00003\.gguf"):
        GGUFFile.open(paths[1])


def test_single_file_that_says_it_is_split_is_refused(tmp_path):
    _, paths = split_model(tmp_path)
    alone = paths[0].rename(tmp_path / "model.gguf")
    with pytest.raises(GGUFError, match=r"split\.count is 3.*-00001-of-00003\.gguf"):
        GGUFFile.open(alone)


@pytest.mark.parametrize(
    "change,message",
    [
        ({"names": ["output_norm.weight", "token_embd.weight"]}, "is in an earlier part too"),
        ({"names": ["other.weight"]}, r"split\.tensors\.count is 30, but the 3 parts hold 21 tensors"),
        ({"no": 2}, r"split\.no is 2; a part with this name needs 1"),
        ({"count": 4}, r"belongs to another model .* split\.count"),
        ({"total": 99}, r"belongs to another model .* split\.tensors\.count"),
        ({"metadata": {"general.name": "somebody else"}}, r"belongs to another model .* general\.name"),
    ],
)
def test_split_part_of_another_model_is_refused(tmp_path, change, message):
    whole, paths = split_model(tmp_path)
    names = list(GGUFFile.open(paths[0]).tensors)
    tensors = {**whole.tensors, "other.weight": whole.tensors["output_norm.weight"]}
    settings = {"names": names[1::3], "no": 1, "count": 3, "total": len(names)} | change
    write_part(paths[1], replace(whole, tensors=tensors), **settings)
    with pytest.raises(GGUFError, match=message):
        GGUFFile.open(paths[0])


def test_split_part_without_split_keys_is_refused(tmp_path):
    _, paths = split_model(tmp_path)
    write_tiny_gguf(paths[1])
    with pytest.raises(GGUFError, match=r"m-00002-of-00003\.gguf: split\.no is None"):
        GGUFFile.open(paths[0])
