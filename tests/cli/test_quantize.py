"""`octavo quantize`: the table and the record, the text that is read, errors of a user."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from octavo.models.gguf import GGUFFile
from octavo.models.loading import load_model
from tests.cli.conftest import Octavo
from tests.models.tiny import write_tiny_gguf


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_tiny_gguf(tmp_path / "in.gguf", hidden=64, ffn=256, tensor_type="F16")


def test_the_table_says_what_became_of_the_matrices(octavo: Octavo, source: Path, tmp_path: Path) -> None:
    target = tmp_path / "out.gguf"
    ended = octavo("quantize", source, target, "--type", "q2_k", "--output-type", "same")
    assert ended.code == 0 and ended.err == ""
    head, *rows, last = ended.out.splitlines()
    assert head.split() == ["MATRICES", "WAS", "IS", "LEVELS", "ERROR", "BYTES", "WERE", "ARE"]
    kinds = [row.split() for row in rows]
    assert [" ".join(kind[:5]) for kind in kinds] == ["layers 12 f16 q4_0 -", "layers 2 f16 q2_k -", "output 1 f16 f16 -"]
    assert kinds[0][6] == "%" and 1 < float(kinds[0][5]) < 15 < float(kinds[1][5]) < 40 and kinds[2][5] == "-"
    assert last == f"{target}: {target.stat().st_size / 1e6:.0f} MB"
    assert load_model(target).program == load_model(source).program


def test_the_record(octavo: Octavo, source: Path, tmp_path: Path) -> None:
    target = tmp_path / "out.gguf"
    record = json.loads(octavo("quantize", source, target, "--type", "q3_k", "--few-levels", "--json").out)
    assert record["target"] == str(target) and record["bytes"] == target.stat().st_size
    kinds = [(m["role"], m["is"], m["levels"]) for m in record["matrices"]]
    assert kinds == [("layers", "q4_1", 8), ("layers", "q3_k", None), ("output", "q4_1", None)]
    sizes = [sum(len(t.data) for t in GGUFFile.open(path).tensors.values() if len(t.shape) == 2) for path in (source, target)]
    embedding = len(GGUFFile.open(source).tensors["token_embd.weight"].data)
    assert [sum(m[key] for m in record["matrices"]) + embedding for key in ("bytes_before", "bytes")] == sizes


def test_the_text_decides_which_weights_matter(octavo: Octavo, source: Path, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("numbers are written with digits")
    made = []
    for i, how in enumerate(([], ["--text", tmp_path / "text.txt"], ["--text-tokens", "5"], ["--text-tokens", "0"])):
        assert octavo("quantize", source, tmp_path / f"{i}.gguf", *how).code == 0
        made.append((tmp_path / f"{i}.gguf").read_bytes())
    assert len(set(made)) == 4 and len({len(one) for one in made}) == 1


def test_a_link_stays_one(octavo: Octavo, source: Path, tmp_path: Path) -> None:
    link, target = tmp_path / "link.gguf", tmp_path / "out.gguf"
    link.symlink_to(target)
    assert octavo("quantize", source, link, "--text-tokens", "0").code == 0 and link.is_symlink() and load_model(target).program
    assert octavo("quantize", source, link, "--text-tokens", "0").code == 1
    assert octavo("quantize", source, link, "--text-tokens", "0", "--force").code == 0 and link.is_symlink()


def test_errors(octavo: Octavo, source: Path, tmp_path: Path) -> None:
    target = tmp_path / "out.gguf"
    target.write_bytes(b"mine")
    ended = octavo("quantize", source, target)
    assert (ended.code, ended.err) == (1, f"octavo: {target}: is there already, and is not overwritten unasked\n")
    assert target.read_bytes() == b"mine"
    assert octavo("quantize", source, target, "--force").code == 0
    target.unlink()
    ended = octavo("quantize", source, target, "--few-levels")
    assert ended.code == 1 and ended.err.startswith("octavo: few_levels: ")
    for wrong in (["--type", "q8_0"], ["--text-tokens", "0", "--text", source], ["--text-tokens", "-1"], ["--text", tmp_path / "none.txt"]):
        assert octavo("quantize", source, target, *wrong).code == 2
    assert octavo("quantize", source).code == 2
    (tmp_path / "text.txt").write_bytes(b"\xff\xfe\xff")
    assert octavo("quantize", source, target, "--text", tmp_path / "text.txt").code == 1
    assert octavo("quantize", source, tmp_path / "no" / "out.gguf").code == 1
    assert not target.exists()
