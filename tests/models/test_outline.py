"""Sizing before the download: from a config alone, from the first part of a file; what cannot be sized names its field."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import gguf
import pytest

from octavo.models.gguf import GGUFError, GGUFFile, GGUFHeader
from octavo.models.loading import open_model
from octavo.models.model_file import ModelFileError
from octavo.models.outline import read_outline
from octavo.models.program import KVLayer
from tests.models.configs import LLAMA_2_7B, MISTRAL_7B, MIXTRAL_8X7B, NUM_WEIGHTS, OPT_13B
from tests.models.tiny import write_tiny_gguf

PARITY = Path(__file__).resolve().parent.parent / "fixtures" / "parity"


def written(folder: Path, config: dict[str, Any], name: str = "model.json") -> Path:
    path = folder / name
    path.write_text(json.dumps(config))
    return path


@pytest.mark.parametrize("name", NUM_WEIGHTS)
def test_weights_are_counted_to_the_last_one(tmp_path: Path, name: str) -> None:
    config, num_weights = NUM_WEIGHTS[name]
    outline = read_outline(written(tmp_path, config))
    assert outline.weight_bytes == 2 * num_weights
    assert ("float16" in outline.weights_from) is ("torch_dtype" in config)


def test_types_of_numbers(tmp_path: Path) -> None:
    half = read_outline(written(tmp_path, LLAMA_2_7B)).weight_bytes
    assert read_outline(written(tmp_path, LLAMA_2_7B | {"torch_dtype": "float32"})).weight_bytes == 2 * half
    assert read_outline(written(tmp_path, LLAMA_2_7B | {"torch_dtype": None, "dtype": "float32"})).weight_bytes == 2 * half
    assert "states no torch_dtype" in read_outline(written(tmp_path, LLAMA_2_7B | {"torch_dtype": None})).weights_from


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, "model_type: None is not allowed; known: llama, .*opt"),
        ({"model_type": "mamba"}, "model_type: 'mamba' is not allowed"),
        ({"model_type": "deepseek_v3", "kv_lora_rank": 512}, "kv_lora_rank: 512 is not allowed; latent attention"),
        ({k: v for k, v in LLAMA_2_7B.items() if k != "hidden_size"}, "hidden_size is missing"),
        (LLAMA_2_7B | {"num_hidden_layers": 0}, "num_hidden_layers: 0 is not allowed"),
        (LLAMA_2_7B | {"num_hidden_layers": 10**9}, "num_hidden_layers: 1000000000 is not allowed; an integer from 1 to 4096"),
        (LLAMA_2_7B | {"num_attention_heads": "32"}, "num_attention_heads: '32' is not allowed"),
        (LLAMA_2_7B | {"num_key_value_heads": 5}, "num_key_value_heads: 5 is not allowed; a divisor"),
        (LLAMA_2_7B | {"torch_dtype": "float8_e4m3fn"}, "torch_dtype: 'float8_e4m3fn' is not allowed; one of float32"),
        (LLAMA_2_7B | {"quantization_config": {"bits": 4}}, "quantization_config: .* not implemented"),
        (MISTRAL_7B | {"sliding_window": -1}, "sliding_window: -1 is not allowed"),
        (OPT_13B | {"ffn_dim": None}, "ffn_dim is missing: a model cannot be sized without it"),
        (OPT_13B | {"num_attention_heads": 41}, "number of heads: 41 is not allowed; a divisor of the hidden size"),
        (OPT_13B | {"num_hidden_layers": 1.5}, "num_hidden_layers: 1.5 is not allowed"),
        (MIXTRAL_8X7B | {"num_local_experts": True}, "num_local_experts: True is not allowed"),
    ],
)
def test_what_cannot_be_sized_names_its_field(tmp_path: Path, config: dict[str, Any], message: str) -> None:
    path = written(tmp_path, config)
    with pytest.raises(ModelFileError, match=f"{path.name}: {message}"):
        read_outline(path)


def test_files_that_describe_nothing(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="is not there"):
        read_outline(tmp_path / "none.json")
    with pytest.raises(ModelFileError, match="holds no config.json"):
        read_outline(tmp_path)
    (tmp_path / "broken.json").write_text("{")
    with pytest.raises(ModelFileError, match="not valid JSON"):
        read_outline(tmp_path / "broken.json")


def test_window_layers_of_unserved_models(tmp_path: Path) -> None:
    outline = read_outline(written(tmp_path, MIXTRAL_8X7B | {"sliding_window": 4096}))
    assert outline.kv_layers == (KVLayer(8, 128, 4096),) * 32 and outline.program is None


@pytest.mark.parametrize("family", ["llama", "llama3", "mistral", "qwen2", "qwen3", "gemma2", "gemma3"])
def test_config_alone_header_alone_and_the_whole_model_say_the_same(tmp_path: Path, family: str) -> None:
    folder, file = PARITY / family, PARITY / family / "model.gguf"
    of_folder, of_config = read_outline(folder), read_outline(written(tmp_path, json.loads((folder / "config.json").read_text())))
    whole = open_model(file).body
    of_header = read_outline(file)
    assert of_folder.program == of_config.program and of_folder.sizes is not None
    assert of_header.kv_layers == of_folder.kv_layers == whole.program.kv_layers
    assert of_header.sizes == {name: len(tensor.data) for name, tensor in whole.weights.items()}
    assert of_folder.weight_bytes == sum(of_folder.sizes.values())


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_gguf(tmp_path_factory.mktemp("models") / "m.gguf", layers=3, tensor_type="Q4_0")


def header_bytes(file: Path) -> int:
    return len(GGUFFile.open(file).headers[0])


def test_the_first_part_of_a_file_is_enough(tmp_path: Path, file: Path) -> None:
    part = tmp_path / "m.gguf"
    for num_bytes in (header_bytes(file), header_bytes(file) + 1000):
        part.write_bytes(file.read_bytes()[:num_bytes])
        assert read_outline(part) == read_outline(file)
    with pytest.raises(ModelFileError, match="but the whole file has"):
        open_model(part)


def test_a_header_that_is_cut_off_is_refused(tmp_path: Path, file: Path) -> None:
    part, whole = tmp_path / "m.gguf", file.read_bytes()
    for num_bytes in (0, 3, 10, 23, 24, 100, 5000, header_bytes(file) - 1):
        part.write_bytes(whole[:num_bytes])
        with pytest.raises(GGUFError, match="m.gguf: "):
            read_outline(part)


def test_a_header_that_lies_is_refused(tmp_path: Path, file: Path) -> None:
    whole, at = file.read_bytes(), header_bytes(file) - 8
    part = tmp_path / "m.gguf"
    part.write_bytes(whole[:at] + (96).to_bytes(8, "little"))  # the last tensor's offset
    with pytest.raises(GGUFError, match="offset of tensor .* is 96, which overlaps the tensor before it"):
        GGUFHeader.read(part)


def test_rotary_factors_need_not_be_there(tmp_path: Path) -> None:
    whole = (PARITY / "llama3" / "model.gguf").read_bytes()
    part = tmp_path / "m.gguf"
    part.write_bytes(whole[: header_bytes(PARITY / "llama3" / "model.gguf")])
    assert read_outline(part).weight_bytes == read_outline(PARITY / "llama3" / "model.gguf").weight_bytes


def test_split_models_need_the_header_of_every_part(tmp_path: Path, file: Path) -> None:
    whole = GGUFFile.open(file)
    names = list(whole.tensors)
    parts = [tmp_path / f"m-{no:05d}-of-00002.gguf" for no in (1, 2)]
    for no, (path, own) in enumerate(zip(parts, (names[:5], names[5:]), strict=True)):
        writer = gguf.GGUFWriter(str(path), "llama")
        writer.add_uint16("split.no", no)
        writer.add_uint16("split.count", 2)
        writer.add_int32("split.tensors.count", len(names))
        if no == 0:
            for key, value in whole.metadata.items():
                if key.startswith("llama."):
                    writer.add_key_value(key, value, gguf.GGUFValueType.get_type(value))
        for name in own:
            writer.add_tensor(name, whole.tensors[name].float32())
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    for path in parts:
        os.truncate(path, path.stat().st_size - 64)
    assert read_outline(parts[0]).kv_layers == read_outline(file).kv_layers
    parts[1].unlink()
    with pytest.raises(GGUFError, match="m-00002-of-00002.gguf is not there"):
        read_outline(parts[0])


def test_weights_on_their_way_are_sized_by_the_config(tmp_path: Path) -> None:
    written(tmp_path, LLAMA_2_7B, "config.json")
    (tmp_path / "model.safetensors").write_bytes(b"\0" * 100)
    outline = read_outline(tmp_path)
    assert outline.weight_bytes == 2 * 6_738_415_616 and "the files beside it cannot be read" in outline.weights_from
