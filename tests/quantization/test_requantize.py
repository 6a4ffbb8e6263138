"""A model packed anew: what changes and what does not, as the reader and the gguf package see it; what is refused; nothing half-written."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from octavo import LLM, SamplingParams
from octavo.models.gguf import GGUFFile
from octavo.models.loading import load_model
from octavo.models.model_file import ModelFileError
from octavo.models.weights import widen
from octavo.quantization.gguf_writing import NewTensor, uint32_pair, write_gguf
from octavo.quantization.requantize import Calibration, Packed, QuantizeError, Recipe, quantize
from tests.models.tiny import write_tiny_gguf

TEXT = "the quick brown fox jumps over the lazy dog"
CHANGED = {"general.file_type", "general.quantization_version", "general.quantized_by"}
FILE_TYPES = {"q4_0": 2, "q4_1": 3, "q2_k": 10, "q3_k": 11}


def packed(
    tmp_path: Path, recipe: Recipe, calibration: Calibration | None = None, **sizes: object
) -> tuple[GGUFFile, GGUFFile, list[Packed]]:
    """A tiny model as it was, as it is now, and what was told of it."""
    source = write_tiny_gguf(tmp_path / "in.gguf", **sizes)
    done = quantize(source, tmp_path / "out.gguf", recipe, calibration, overwrite=True)
    assert not list(tmp_path.glob(".*"))
    return GGUFFile.open(source), GGUFFile.open(tmp_path / "out.gguf"), done


def types(file: GGUFFile) -> dict[str, str]:
    return {name: tensor.dtype for name, tensor in file.tensors.items() if len(tensor.shape) == 2}


@pytest.mark.parametrize("layers", ["q2_k", "q3_k", "q4_0", "q4_1"])
def test_matrices_change_and_nothing_else_does(tmp_path: Path, layers: str) -> None:
    was, now, done = packed(tmp_path, Recipe(layers, "q4_1"), Calibration(TEXT), hidden=256, ffn=512, vocab=288, tensor_type="F16")
    assert list(now.tensors) == list(was.tensors) and now.version == 3
    assert {key: value for key, value in now.metadata.items() if key not in CHANGED} == dict(was.metadata)
    assert now.metadata["general.file_type"] == FILE_TYPES[layers] and "octavo" in str(now.metadata["general.quantized_by"])
    by_name = {one.tensor.name: one for one in done}
    for name, tensor in now.tensors.items():
        original = was.tensors[name]
        assert tensor.shape == original.shape
        if len(tensor.shape) == 1 or name == "token_embd.weight":  # untied: the embedding is no matrix
            assert (tensor.dtype, bytes(tensor.data)) == (original.dtype, bytes(original.data))
            continue
        assert tensor.dtype == ("q4_1" if name == "output.weight" else layers)
        off = np.square(widen(tensor).astype(np.float64) - widen(original)).sum() / np.square(widen(original)).sum()
        assert off < {"q2_k": 0.12, "q3_k": 0.04, "q4_0": 0.01, "q4_1": 0.01}[tensor.dtype]
        one = by_name[name]
        assert one.num_bytes == len(tensor.data) and 0 < one.squared_error / one.squares < 0.12


def test_the_gguf_package_reads_the_same(tmp_path: Path) -> None:
    _, now, _ = packed(tmp_path, Recipe("q2_k", "q3_k"), hidden=256, ffn=256, vocab=300, arch="gemma3")
    theirs = gguf.GGUFReader(tmp_path / "out.gguf")
    assert [t.name for t in theirs.tensors] == list(now.tensors)
    for tensor in theirs.tensors:
        assert tensor.data.tobytes() == bytes(now.tensors[tensor.name].data)
        assert tensor.tensor_type.name.lower() == now.tensors[tensor.name].dtype
    assert theirs.fields["tokenizer.ggml.tokens"].contents() == list(now.metadata["tokenizer.ggml.tokens"])


@pytest.mark.parametrize("few,expected", [(False, "q4_0"), (True, "q4_1")])
@pytest.mark.parametrize("layers,levels", [("q2_k", 4), ("q3_k", 8)])
def test_rows_that_blocks_of_256_do_not_divide(tmp_path: Path, layers: str, levels: int, few: bool, expected: str) -> None:
    was, now, done = packed(tmp_path, Recipe(layers, "q4_0", few), hidden=96, heads=3, kv_heads=3, ffn=256, tied=True)
    found = types(now)
    assert found.pop("token_embd.weight") == "q4_0"  # tied: the output matrix
    assert {dtype for name, dtype in found.items() if "ffn_down" in name} == {layers}
    assert {dtype for name, dtype in found.items() if "ffn_down" not in name} == {expected}
    for one in done:
        if few and one.dtype == "q4_1":
            assert one.levels == levels
            rows = widen(now.tensors[one.tensor.name]).reshape(-1, 32)
            assert max(len(np.unique(row)) for row in rows) == levels


def test_what_would_not_get_smaller_is_kept(tmp_path: Path) -> None:
    kinds = {"blk.0.attn_q.weight": "Q2_K", "blk.0.attn_k.weight": "Q4_0", "blk.1.ffn_up.weight": "Q8_0"}
    was, now, done = packed(tmp_path, Recipe("q3_k", None), hidden=256, ffn=256, vocab=300, tensor_type="Q3_K", tensor_types=kinds)
    expected = {name: "q3_k" for name in types(was)} | {"blk.0.attn_q.weight": "q2_k"}
    assert types(now) == expected
    changed = {name for name in was.tensors if bytes(was.tensors[name].data) != bytes(now.tensors[name].data)}
    assert changed == {"blk.0.attn_k.weight", "blk.1.ffn_up.weight"}
    assert [one.kept for one in done] == [one.tensor.name not in changed for one in done]


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    hidden=st.sampled_from([32, 48, 64, 256]), ffn=st.sampled_from([32, 80, 256]), vocab=st.integers(260, 300), tied=st.booleans(),
    layers=st.sampled_from(["q2_k", "q3_k", "q4_0", "q4_1"]), output=st.sampled_from([None, "q2_k", "q4_1"]), seed=st.integers(0, 99),
)  # fmt: skip
def test_any_shape_gives_a_model_that_can_be_served(
    tmp_path: Path, hidden: int, ffn: int, vocab: int, tied: bool, layers: str, output: str | None, seed: int
) -> None:
    recipe = Recipe(layers, output)
    source = write_tiny_gguf(tmp_path / "in.gguf", hidden=hidden, ffn=ffn, vocab=vocab, tied=tied, seed=seed)
    if hidden == 48 and ffn == 80:  # no row is a whole number of blocks
        with pytest.raises(QuantizeError, match="nothing would get smaller"):
            quantize(source, tmp_path / "out.gguf", recipe, overwrite=True)
        return
    done = quantize(source, tmp_path / "out.gguf", recipe, Calibration(TEXT, 8), overwrite=True)
    model = load_model(tmp_path / "out.gguf")
    assert {one.name: one.dtype for one in done} == {one.name: model.weights[one.name].dtype for one in done}
    assert model.weight_bytes < load_model(source).weight_bytes


def test_it_drafts_for_its_source(tmp_path: Path) -> None:
    source = write_tiny_gguf(tmp_path / "in.gguf", hidden=256, ffn=256)
    quantize(source, tmp_path / "out.gguf", Recipe("q4_1", "q4_1"), Calibration(TEXT))
    params = [SamplingParams(temperature=t, seed=i, max_tokens=30, ignore_eos=True) for i, t in enumerate((0.0, 0.0, 1.0))]

    def tokens(**options: object) -> tuple[list[list[int]], LLM]:
        with LLM(str(source), num_kv_blocks=64, **options) as llm:
            return [out.outputs[0].token_ids for out in llm.generate([TEXT, "hello", "numbers"], params)], llm

    want, _ = tokens()
    got, llm = tokens(spec=3, spec_method="draft", draft_model=str(tmp_path / "out.gguf"))
    stats = llm.engine.speculator.stats
    assert got == want and 0 < stats.num_accepted < stats.num_proposed


def test_all_parts_of_a_split_model_become_one_file(tmp_path: Path) -> None:
    whole = write_tiny_gguf(tmp_path / "whole.gguf")
    names = list(GGUFFile.open(whole).tensors)
    drop = [{name: None for name in part} for part in (names[5:], names[:5])]
    for no, tensors in enumerate(drop):
        extra = {"split.no": no, "split.count": 2, "split.tensors.count": len(names)}
        write_tiny_gguf(tmp_path / f"m-0000{no + 1}-of-00002.gguf", tensors=tensors, metadata_overrides=extra)
    for source, target in ((whole, "a.gguf"), (tmp_path / "m-00001-of-00002.gguf", "b.gguf")):
        quantize(source, tmp_path / target, Recipe("q4_0", None))
    assert (tmp_path / "a.gguf").read_bytes() == (tmp_path / "b.gguf").read_bytes()


def test_alignment_is_the_source_s(tmp_path: Path) -> None:
    source = write_tiny_gguf(tmp_path / "in.gguf")
    for alignment in (8, 4096):
        aligned = realigned(source, tmp_path / f"{alignment}.gguf", alignment)
        quantize(aligned, tmp_path / "out.gguf", Recipe("q4_0", "q4_0"), overwrite=True)
        assert GGUFFile.open(tmp_path / "out.gguf").metadata["general.alignment"] == alignment


def realigned(source: Path, target: Path, alignment: int) -> Path:
    file = GGUFFile.open(source)
    pairs = dict(file.metadata.raw) | {"general.alignment": uint32_pair("general.alignment", alignment)}
    tensors = [NewTensor(name, t.dtype, t.shape, lambda data=t.data: (data,)) for name, t in file.tensors.items()]
    write_gguf(target, pairs, tensors, alignment)
    return target


# ---- refusals ----


@pytest.mark.parametrize(
    "recipe,message",
    [
        (Recipe("q4_k", None), "type: 'q4_k' is not allowed; known: q2_k, q3_k, q4_0, q4_1"),
        (Recipe("q2_k", "q8_0"), "output_type: 'q8_0' is not allowed"),
        (Recipe("q4_0", "q4_1", few_levels=True), "few_levels: has no meaning without q2_k or q3_k"),
    ],
)
def test_recipes_that_cannot_be(tmp_path: Path, recipe: Recipe, message: str) -> None:
    with pytest.raises(QuantizeError, match=message):
        quantize(write_tiny_gguf(tmp_path / "in.gguf"), tmp_path / "out.gguf", recipe)
    assert not (tmp_path / "out.gguf").exists()


def test_sources_that_cannot_be(tmp_path: Path) -> None:
    def refused(source: Path, message: str) -> None:
        with pytest.raises(ModelFileError, match=message):
            quantize(source, tmp_path / "out.gguf", Recipe("q3_k", "q4_0"))

    refused(tmp_path, "is a folder; only GGUF files can be packed anew")
    refused(tmp_path / "nothing.gguf", "is not there")
    (tmp_path / "text.gguf").write_bytes(b"hello" * 100)
    refused(tmp_path / "text.gguf", "a GGUF file starts with")
    small = write_tiny_gguf(tmp_path / "q4.gguf", tensor_type="Q4_0")
    refused(small, "nothing would get smaller as layers q3_k, output q4_0; its matrices are q4_0")
    whole = write_tiny_gguf(tmp_path / "in.gguf").read_bytes()
    (tmp_path / "cut.gguf").write_bytes(whole[:-2000])
    refused(tmp_path / "cut.gguf", "past the file's")
    assert not (tmp_path / "out.gguf").exists()


def test_targets_that_must_not_be_written(tmp_path: Path) -> None:
    source = write_tiny_gguf(tmp_path / "in.gguf")
    before = source.read_bytes()
    (tmp_path / "link.gguf").symlink_to(source)
    (tmp_path / "there.gguf").write_bytes(b"mine")
    recipe = Recipe("q4_0", "q4_0")
    for target, overwrite, message in (
        (source, True, "is the file that is read"),
        (tmp_path / "link.gguf", True, "is the file that is read"),
        (tmp_path, True, "is there and no regular file"),
        (tmp_path / "there.gguf", False, "is there already, and is not overwritten unasked"),
        (tmp_path / "no" / "folder.gguf", False, "its folder is not there"),
    ):
        with pytest.raises(QuantizeError, match=message):
            quantize(source, target, recipe, overwrite=overwrite)
    with pytest.raises(OSError):
        quantize(source, tmp_path / ("n" * 300), recipe)
    assert source.read_bytes() == before and (tmp_path / "there.gguf").read_bytes() == b"mine"
    quantize(source, tmp_path / "there.gguf", recipe, overwrite=True)
    assert load_model(tmp_path / "there.gguf").weight_bytes < load_model(source).weight_bytes


@pytest.mark.parametrize("bad", [np.nan, np.inf, 1e6])
def test_a_weight_that_cannot_be_packed_leaves_nothing_behind(tmp_path: Path, bad: float) -> None:
    values = np.random.default_rng(0).standard_normal((64, 128), dtype=np.float32)
    values[63, 5] = bad
    source = write_tiny_gguf(tmp_path / "in.gguf", tensors={"blk.1.ffn_down.weight": values})
    (tmp_path / "out.gguf").write_bytes(b"mine")
    with pytest.raises(QuantizeError, match=r"tensor 'blk\.1\.ffn_down\.weight', rows from 0: value \S+ at flat index 8069"):
        quantize(source, tmp_path / "out.gguf", Recipe("q4_0", None), overwrite=True)
    assert (tmp_path / "out.gguf").read_bytes() == b"mine" and sorted(p.name for p in tmp_path.iterdir()) == ["in.gguf", "out.gguf"]


def test_calibration_that_cannot_be(tmp_path: Path) -> None:
    source = write_tiny_gguf(tmp_path / "in.gguf")
    for calibration, message in ((Calibration(TEXT, 0), "calibration tokens: 0"), (Calibration(""), "calibration text: has no tokens")):
        with pytest.raises(QuantizeError, match=message):
            quantize(source, tmp_path / "out.gguf", Recipe("q4_0", None), calibration)
    assert not (tmp_path / "out.gguf").exists()


def test_calibration_weighs_errors_by_what_comes_in(tmp_path: Path) -> None:
    """Two of the inputs are large: the error of the matrices on such inputs is what gets smaller."""
    loud = np.ones(256, np.float32)
    loud[[3, 200]] = 40
    norms = {f"blk.{i}.{name}.weight": loud for i in range(2) for name in ("attn_norm", "ffn_norm")}
    sizes: dict[str, object] = {"hidden": 256, "ffn": 256, "tensors": norms}
    errors = []
    for calibration in (None, Calibration(TEXT)):
        was, now, _ = packed(tmp_path, Recipe("q2_k", None), calibration, **sizes)
        off = [widen(now.tensors[name]) - widen(was.tensors[name]) for name in was.tensors if name.endswith(("gate.weight", "q.weight"))]
        errors.append(sum(float(np.square(one * loud).sum()) for one in off))
    assert errors[1] < 0.3 * errors[0]
