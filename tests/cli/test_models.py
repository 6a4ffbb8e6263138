"""`octavo pull` and `octavo models` on a cache of their own."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path

import pytest

from octavo.models import catalog
from octavo.models.catalog import CatalogEntry, PullError
from octavo.models.loading import load_model
from tests.cli.conftest import Octavo


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of an empty cache."""
    monkeypatch.setenv("OCTAVO_HOME", str(tmp_path / "home"))
    return tmp_path / "home" / "models"


@pytest.fixture
def entry(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> CatalogEntry:
    """A catalogue model that the fake hub has."""
    data = tiny.read_bytes()
    entry = CatalogEntry("toy", "toy.gguf", len(data), hashlib.sha256(data).hexdigest(), "", hub=("me/toy", "toy.gguf"))
    monkeypatch.setitem(catalog.CATALOG, "toy", entry)
    monkeypatch.setattr(catalog, "_fetch_hub", lambda _entry, part, _scratch: shutil.copy(tiny, part))
    return entry


def rows(octavo: Octavo) -> dict[str, list[str]]:
    ended = octavo("models")
    assert ended.code == 0 and ended.err == ""
    head, *lines = ended.out.splitlines()
    assert head.split() == ["NAME", "WEIGHTS", "CONTEXT", "KV/TOKEN", "FILE"]
    return {line.split("  ")[0].strip(): [cell.strip() for cell in line.split("  ") if cell.strip()][1:] for line in lines}


def test_pull_prints_the_path_and_fetches_once(octavo: Octavo, models: Path, entry: CatalogEntry, monkeypatch: pytest.MonkeyPatch) -> None:
    ended = octavo("pull", "toy")
    assert ended.code == 0 and ended.out == f"{models / 'toy.gguf'}\n" and ended.err.startswith("fetching toy (")
    monkeypatch.setattr(catalog, "_fetch_hub", lambda *_: pytest.fail("fetched again"))
    again = octavo("pull", "toy")
    assert again.out == ended.out and again.err == ""


def test_a_pull_that_fails_says_why_and_leaves_nothing(
    octavo: Octavo, models: Path, entry: CatalogEntry, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise PullError("hf:me/toy:toy.gguf could not be downloaded: no route to host")

    monkeypatch.setattr(catalog, "_fetch_hub", fail)
    ended = octavo("pull", "toy")
    assert ended.code == 1 and ended.err.endswith("octavo: toy: hf:me/toy:toy.gguf could not be downloaded: no route to host\n")
    assert list(models.iterdir()) == []


def test_a_run_fetches_what_is_not_there(octavo: Octavo, models: Path, entry: CatalogEntry) -> None:
    ended = octavo("run", "--raw", "hello", "--model", "toy", "--max-tokens", "2")
    assert ended.code == 0 and ended.err.startswith("fetching toy (") and (models / "toy.gguf").is_file()


def test_models_lists_catalogue_and_cache(octavo: Octavo, models: Path, entry: CatalogEntry, tiny: Path) -> None:
    assert rows(octavo)["smollm2"] == ["98 MB", "-", "-", "not here; octavo pull smollm2"]
    octavo("pull", "toy")
    hub = models / "hf" / "me" / "repo"
    hub.mkdir(parents=True)
    shutil.copy(tiny, hub / "q8.gguf")
    (models / "broken.gguf").write_bytes(b"GGUF" + bytes(40))
    shown = rows(octavo)
    model = load_model(tiny)
    figures = [f"{model.weight_bytes / 1e6:.0f} MB", str(model.program.context), f"{model.program.kv_bytes_per_token(2)} B"]
    assert shown["toy"] == [*figures, str(models / "toy.gguf")]
    assert shown["hf:me/repo:q8.gguf"] == [*figures, str(hub / "q8.gguf")]
    assert shown["broken.gguf"][:3] == ["-", "-", "-"] and shown["broken.gguf"][3].startswith("cannot be served: ")
    assert set(shown) == {*catalog.CATALOG, "hf:me/repo:q8.gguf", "broken.gguf"}
