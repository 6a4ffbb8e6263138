"""What starting costs: the command's help imports nothing but click, `import octavo` nothing heavy."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.models.tiny import write_tiny_gguf

HEAVY = {"numpy", "tokenizers", "jinja2", "huggingface_hub", "starlette", "uvicorn", "prometheus_client", "msgspec", "torch"}


def modules_after(code: str) -> set[str]:
    script = f"{code}\nimport sys, json\nprint(json.dumps(sorted({{m.split('.')[0] for m in sys.modules}})))"
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return set(json.loads(run.stdout.splitlines()[-1]))


def test_import_octavo_is_light() -> None:
    assert not modules_after("import octavo") & (HEAVY | {"click"})


def test_help_and_version_import_only_click() -> None:
    code = "from octavo.cli.main import cli\nfor a in (['--help'], ['--version']):\n    cli.main(a, standalone_mode=False)"
    assert not modules_after(code) & HEAVY


def test_what_serves_is_not_imported_before_the_model_loads() -> None:
    assert not modules_after("import octavo.cli.serve, octavo.server.launch, octavo.server.options") & HEAVY


def test_a_server_starts_without_what_it_needs_later_or_never(tmp_path: Path) -> None:
    """Up to the moment it listens: no downloads, no metrics, no deep learning framework."""
    path = write_tiny_gguf(tmp_path / "m.gguf")
    code = f"""
from octavo.config import CacheConfig, EngineConfig, ModelConfig
from octavo.server import launch, run
run.Server.run = lambda self, sockets: None
launch.run_server(EngineConfig(ModelConfig({str(path)!r}), CacheConfig(num_kv_blocks=8)), port=0)"""
    found = modules_after(code)
    assert found >= {"starlette", "uvicorn", "tokenizers"}
    assert not found & {"huggingface_hub", "torch", "transformers", "requests", "httpx"}


def test_core_is_pure_standard_library() -> None:
    code = "import octavo.core.scheduler, octavo.core.kv_manager, octavo.core.policy, octavo.core.clock, octavo.core.cost"
    assert not modules_after(code) & (HEAVY | {"click"})


def test_the_public_names_resolve() -> None:
    code = "import octavo\nassert octavo.LLM and octavo.SamplingParams and octavo.EngineConfig and octavo.__version__"
    assert "octavo" in modules_after(code)
