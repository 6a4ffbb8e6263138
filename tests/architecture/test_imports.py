"""Who may import whom. Reads every import statement, lazy and type-checking ones included; runs none of the code."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

import pytest

SRC = Path(__file__).parents[2] / "src" / "octavo"

# package -> packages of octavo it may import besides itself; everyone may import config and the standard library.
MAY_IMPORT = {
    "core": set(),
    "models": {"core"},
    "sampling": {"core"},
    "costs": {"core", "models"},
    "backends": {"core", "models", "sampling", "costs"},
    "speculative": {"core", "models", "sampling", "backends.base"},
    "quantization": {"core", "models", "backends.reference.ops"},
    "engine": {"core", "models", "sampling", "costs", "backends", "speculative"},
    "workload": {"core"},
    "server": {"engine", "core", "models", "sampling", "distributed"},
    "bench": {"core", "engine", "workload", "models", "backends", "distributed"},
    "distributed": {"core", "engine", "models", "costs", "backends.base", "backends.kv_wire", "backends.machine"},
    "simulator": {
        "core", "models.program", "costs", "backends.base", "backends.sim", "speculative", "engine.loop", "engine.timeline",
        "engine.outputs", "distributed.router", "distributed.views", "distributed.handoff", "distributed.handover", "distributed.pools",
        "distributed.roles", "distributed.role_router", "distributed.dispatcher", "distributed.told_load", "distributed.autoscale",
        "distributed.pool_scaling", "distributed.receivers", "workload",
    },  # never torch, ray or the native module
    "planning": {"core", "models", "costs", "simulator", "workload", "distributed.router", "distributed.handoff"},
    "reproduce": {
        "bench", "simulator", "engine", "workload", "core", "costs", "distributed.handoff", "distributed.router",
        "distributed.wire",
    },
    "config": set(),
}
# package -> third-party modules it may import.
LIBRARIES = {
    "core": set(),
    "models": {"numpy", "tokenizers", "jinja2", "huggingface_hub", "msgspec"},
    "sampling": {"numpy"},
    "costs": set(),
    "backends": {"numpy"},
    "speculative": {"numpy"},
    "quantization": {"numpy"},
    "engine": set(),
    "server": {"starlette", "uvicorn", "httptools", "msgspec", "prometheus_client", "anyio", "uvloop"},
    "workload": set(),
    "bench": {"numpy", "httptools", "msgspec"},
    "cli": {"click", "msgspec"},
    "distributed": {"msgspec", "ray"},
    "simulator": set(),
    "planning": set(),
    "reproduce": set(),
    "config": set(),
}
# modules of distributed/ that compute and nothing else: the same objects serve a simulation and real workers.
PURE = (
    "router", "views", "homes", "soonest", "published_keys", "reuse", "learned_costs", "fair_queue", "fair_ring", "delays", "dispatcher",
    "told_load", "handoff", "handover", "questions", "pools", "roles", "role_router", "autoscale", "pool_scaling", "barred", "struck",
    "kv_trials", "attendance", "receivers",
)  # fmt: skip
NOT_PURE = {"asyncio", "multiprocessing", "os", "random", "select", "socket", "ssl", "subprocess", "threading", "time"}
FILES = sorted(SRC.rglob("*.py"))


def imported_modules(file: Path) -> list[tuple[int, str]]:
    """(line, module) of every import; relative ones made absolute, `from octavo import x` as octavo.x."""
    out = []
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            out += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}:{node.lineno}: relative import"
            module = node.module or ""
            if module.startswith("octavo"):
                out += [(node.lineno, f"{module}.{alias.name}") for alias in node.names]
            else:
                out.append((node.lineno, module))
    return out


def package_of(file: Path) -> str:
    parts = file.relative_to(SRC).parts
    return parts[0] if len(parts) > 1 else file.stem


def test_there_is_something_to_check() -> None:
    assert len(FILES) > 30


@pytest.mark.parametrize("file", FILES, ids=lambda f: str(f.relative_to(SRC)))
def test_imports_follow_the_layers(file: Path) -> None:
    package = package_of(file)
    if package == "__init__":
        return  # the lazy front door; test_lazy covers it
    for line, module in imported_modules(file):
        where = f"{file.relative_to(SRC)}:{line} imports {module}"
        if module == "octavo":
            continue  # the front door: __version__, everything else is lazy
        if module.split(".")[0] == "octavo":
            target = ".".join(module.split(".")[1:])
            top = target.split(".")[0]
            assert top != "cli" or package == "cli", f"{where}: nobody imports cli"
            if package == "cli" or top in (package, "config"):
                continue
            allowed = MAY_IMPORT[package]
            assert top in allowed or any(target == a or target.startswith(a + ".") for a in allowed if "." in a), where
        elif module.split(".")[0] not in sys.stdlib_module_names:
            assert module.split(".")[0] in LIBRARIES[package], where


@pytest.mark.parametrize("name", PURE)
def test_pure_modules_of_distributed_read_no_clock_and_send_nothing(name: str) -> None:
    for line, module in imported_modules(SRC / "distributed" / f"{name}.py"):
        parts = module.split(".")
        if parts[0] == "octavo":
            assert parts[1] == "core" or (parts[1] == "distributed" and parts[2] in PURE), f"{name}.py:{line} imports {module}"
        else:
            assert parts[0] in sys.stdlib_module_names and parts[0] not in NOT_PURE, f"{name}.py:{line} imports {module}"


@pytest.mark.parametrize("file", [f for f in FILES if f.name == "__init__.py" and f.parent != SRC], ids=lambda f: str(f.relative_to(SRC)))
def test_package_inits_are_empty(file: Path) -> None:
    tree = ast.parse(file.read_text())
    assert all(isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) for node in tree.body), "only a docstring"


def test_two_files_import_ray() -> None:
    pattern = re.compile(r"^\s*(?:import|from) ray\b", re.MULTILINE)
    found = {file.relative_to(SRC).as_posix() for file in FILES if pattern.search(file.read_text())}
    assert found == {"distributed/ray_worker.py", "distributed/ray_cluster.py"}
