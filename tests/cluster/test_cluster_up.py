"""`octavo cluster up`: what the command line makes of a file, and what it says of a bad one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from octavo.cli.cluster_up import serve_arguments, up
from octavo.distributed.cluster_file import ClusterFileError, read_cluster_file
from octavo.distributed.handshake import SecretError
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


def invoke(tmp_path: Path, text: str) -> None:
    """What the command raises, which `octavo` shows as one line."""
    path = tmp_path / "cluster.toml"
    path.write_text(text)
    CliRunner().invoke(up, [str(path), "--check"], catch_exceptions=False)


def test_check(tmp_path: Path) -> None:
    assert run(tmp_path, f"model = 'm'\n{WORKERS}") == (0, f"{tmp_path / 'cluster.toml'} is in order: 3 workers\n")
    code, text = run(tmp_path, f"model = 'm'\n[serve]\nport = 70000\n{WORKERS}")
    assert code == 1 and "cluster.toml: Invalid value for '--port': 70000 is not in the range" in text
    code, text = run(tmp_path, f"model = 'm'\n[engine]\nblock_size = 7\n{WORKERS}")
    assert code == 2 and "'--block-size': 7 is not allowed; a multiple of 16" in text


def test_check_reads_the_secret(tmp_path: Path) -> None:
    secret = tmp_path / "cluster.secret"
    text = f"model = 'm'\nsecret_file = 'cluster.secret'\n{WORKERS}"
    with pytest.raises(SecretError, match="cannot be read"):
        invoke(tmp_path, text)
    secret.write_text("s" * 16)
    secret.chmod(0o644)
    with pytest.raises(SecretError, match=re.escape(f"{str(secret)!r} is not allowed") + ".*mode 0644"):
        invoke(tmp_path, text)
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
