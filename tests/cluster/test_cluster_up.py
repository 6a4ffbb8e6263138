"""`octavo cluster up`: what the command line makes of a file, and what it says of a bad one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from octavo.cli.cluster_up import serve_arguments, up
from octavo.distributed.cluster_file import ClusterFileError, read_cluster_file
from tests.docs.pages import page

WORKERS = "[[workers]]\nrole = 'prefill'\nnumber = 2\n[[workers]]\nrole = 'decode'\n"


def arguments(tmp_path: Path, text: str) -> list[str]:
    path = tmp_path / "cluster.toml"
    path.write_text(text)
    return serve_arguments(read_cluster_file(path), "cluster.toml")


def test_processes_of_this_host(tmp_path: Path) -> None:
    assert arguments(tmp_path, f"model = 'm'\n{WORKERS}") == ["--model", "m", "--workers", "prefill=2,decode=1"]


def test_all_that_flags_can_say(tmp_path: Path) -> None:
    head = "model = 'm'\nsecret_file = 's'\n[serve]\nport = 0\nexplain_cache = true\nworker_wait_s = 2.5\n[control]\nhost = '::1'\n"
    engine = "[engine]\nkv_cache_memory = '2GiB'\nno_enable_prefix_caching = false\nmax_model_len = 99\n"
    workers = "[[workers]]\nrole = 'prefill'\nnumber = 2\ncpus = 3\n[[workers]]\nrole = 'decode'\ncpus = 3\n"
    made = arguments(tmp_path, head + engine + workers)
    where = ["--workers-listen", "[::1]:7070", "--cluster-secret-file", str(tmp_path / "s")]
    serve = ["--port", "0", "--explain-cache", "--worker-wait-s", "2.5"]
    of_engine = ["--kv-cache-memory", "2GiB", "--max-model-len", "99", "--threads", "3"]
    assert made == ["--model", "m", "--workers", "prefill=2,decode=1", *where, *serve, *of_engine]


def test_on_ray_cores_are_for_ray_to_know(tmp_path: Path) -> None:
    made = arguments(tmp_path, "model = 'm'\n[ray]\n[[workers]]\ncpus = 3\n")
    assert made == ["--model", "m", "--workers", "both=1", "--ray"]


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ("[serve]\nprt = 1", "cluster.toml: serve.prt: there is no such field; there are: served_model_name, host, port"),
        ("[serve]\nthreads = 1", "cluster.toml: serve.threads: there is no such field"),
        ("[serve]\nworkers = 1", "cluster.toml: serve.workers: there is no such field"),
        ("[engine]\nport = 1", "cluster.toml: engine.port: there is no such field; there are: max_model_len"),
        ("[engine]\nmodel = 'x'", "cluster.toml: engine.model: there is no such field"),
        ("[serve]\nport = [1]", "cluster.toml: serve.port: [1] is not allowed; a text or a number is needed"),
        ("[serve]\nport = true", "cluster.toml: serve.port: True is not allowed; a text or a number is needed"),
        ("[serve]\nexplain_cache = 1", "cluster.toml: serve.explain_cache: 1 is not allowed; true or false"),
    ],
)
def test_what_is_no_flag_is_named(tmp_path: Path, table: str, message: str) -> None:
    with pytest.raises(ClusterFileError, match="^" + re.escape(message)):
        arguments(tmp_path, f"model = 'm'\n{table}\n{WORKERS}")


def run(tmp_path: Path, text: str) -> tuple[int, str]:
    path = tmp_path / "cluster.toml"
    path.write_text(text)
    result = CliRunner().invoke(up, [str(path), "--check"])
    return result.exit_code, result.output


def test_check(tmp_path: Path) -> None:
    assert run(tmp_path, f"model = 'smollm2'\n{WORKERS}") == (0, f"{tmp_path / 'cluster.toml'} is in order: 3 workers\n")
    assert run(tmp_path, "model = 'smollm2'\n[[workers]]") == (0, f"{tmp_path / 'cluster.toml'} is in order: 1 worker\n")
    code, text = run(tmp_path, f"model = 'm'\n[serve]\nport = 70000\n{WORKERS}")
    assert code == 1 and "cluster.toml: Invalid value for '--port': 70000 is not in the range" in text
    code, text = run(tmp_path, f"model = 'm'\n[serve]\nmax_workers = 4\n{WORKERS}")
    assert code == 1 and "'--max-workers': 4 is not allowed; numbers by role such as decode=4, since workers is prefill=2,decode=1" in text
    code, text = run(tmp_path, f"model = 'm'\n[serve]\nmax_workers = 'prefill=1'\n{WORKERS}")
    assert code == 1 and "'--max-workers': prefill=1 is not allowed; at least as many as workers has of them (2)" in text
    assert run(tmp_path, f"model = 'smollm2'\n[serve]\nmax_workers = 'decode=3'\n{WORKERS}")[0] == 0
    code, text = run(tmp_path, f"model = 'm'\n[engine]\nblock_size = 7\n{WORKERS}")
    assert code == 1 and "cluster.toml: Invalid value for '--block-size': 7 is not allowed; a multiple of 16" in text


@pytest.mark.parametrize(
    ("head", "message"),
    [
        ("model = 'nowhere'", "model: 'nowhere' is neither a file, a folder, hf:owner/repo[:file], nor one of smollm2"),
        ("model = 'smollm2'\n[engine]\ndraft_model = 'x/y.gguf'", "'x/y.gguf' is neither a file"),
        ("model = 'smollm2'\nsecret_file = 'none'", "it cannot be read"),
        ("model = 'smollm2'\nsecret_file = 'short'", "holds a secret of 5 characters; at least 16 are needed"),
        ("model = 'smollm2'\n[control]\nhost = '127.0.0.1'", "OCTAVO_CLUSTER_SECRET"),
    ],
)
def test_a_check_looks_for_what_the_file_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, head: str, message: str) -> None:
    monkeypatch.delenv("OCTAVO_CLUSTER_SECRET", raising=False)
    (tmp_path / "short").write_text("short")
    (tmp_path / "short").chmod(0o600)
    code, text = run(tmp_path, f"{head}\n{WORKERS}")
    assert code == 1 and f"{tmp_path / 'cluster.toml'}: " in text and message in text


def test_check_reads_the_secret(tmp_path: Path) -> None:
    secret = tmp_path / "cluster.secret"
    text = f"model = 'smollm2'\nsecret_file = 'cluster.secret'\n{WORKERS}"
    secret.write_text("s" * 16)
    secret.chmod(0o644)
    code, said = run(tmp_path, text)
    assert code == 1 and f"{str(secret)!r} is not allowed" in said and "mode 0644" in said
    secret.chmod(0o600)
    assert run(tmp_path, text)[0] == 0


def test_the_documented_file_is_in_order(tmp_path: Path) -> None:
    found = re.search(r"```toml\n(.*?)```", page("docs/cluster.md"), re.DOTALL)
    assert found is not None
    (tmp_path / "cluster.secret").touch(0o600)
    (tmp_path / "cluster.secret").write_text("s" * 16)
    assert run(tmp_path, found[1])[0] == 0
    assert arguments(tmp_path, found[1])[-1] == "--ray"


def test_without_the_extra_it_says_which_one_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    from octavo.config import EngineConfig, ModelConfig
    from octavo.distributed.cluster_file import ClusterFile, WorkerGroup
    from octavo.distributed.cluster_options import ClusterOptions
    from octavo.distributed.open_on_ray import MissingExtra, open_on_ray

    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(sys.modules, "octavo.distributed.ray_cluster", raising=False)
    with pytest.raises(MissingExtra, match=r"Ray is not installed; `pip install 'octavo\[ray\]'` brings it"):
        open_on_ray(EngineConfig(ModelConfig("m")), "m", ClusterFile("m", (WorkerGroup(),)), ClusterOptions())
