"""What a snapshot says of the engine: only what is so."""

from __future__ import annotations

from pathlib import Path

import pytest

from octavo import LLM
from octavo.engine.window_snapshot import snapshot
from tests.models.tiny import write_tiny_gguf


@pytest.mark.parametrize(("arch", "grouped", "has_groups"), [("llama", True, False), ("gemma3", True, True), ("gemma3", False, False)])
def test_groups_are_told_where_layers_give_blocks_back(tmp_path: Path, arch: str, grouped: bool, has_groups: bool) -> None:
    path = write_tiny_gguf(tmp_path / "m.gguf", arch, layers=6, hidden=32, heads=2, ffn=32, context=2048)
    with LLM(str(path), num_kv_blocks=16, enable_kv_groups=grouped) as llm:
        assert (snapshot(llm.engine, 60.0).engine.layout is not None) == has_groups
