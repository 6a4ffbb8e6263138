"""Models of a hub by hf:owner/repo[:file], through huggingface_hub: its endpoint, token, offline switch and resumed downloads."""

from __future__ import annotations

import os
import re
from pathlib import Path
from urllib.parse import quote

from octavo.models.catalog import NoSuchModel, PullError, models_folder

# Xet transfers size their buffers by constants of gigabytes; plain HTTPS resumes just as well on small machines.
os.environ.setdefault("HF_HUB_DISABLE_XET", "1")

_SPEC = re.compile(r"hf:(?P<repo>[\w.-]+/[\w.-]+)(?::(?P<file>[^:]+))?")
_SPLIT = re.compile(r"(?P<stem>.*)-\d{5}-of-(?P<count>\d{5})\.gguf")
_FOLDER_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
)
_PREFERRED = "q4_k_m"  # of several GGUF files, as llama.cpp chooses


def parse_spec(spec: str) -> tuple[str, str | None]:
    """(owner/repo, file or None). Raises PullError."""
    match = _SPEC.fullmatch(spec)
    if match is None or ".." in spec:
        raise NoSuchModel(f"model: {spec!r} is not of the form hf:owner/repo[:file]")
    return match["repo"], match["file"]


def ensure_hub_model(spec: str) -> Path:
    """A local path for ``spec``, downloaded into the cache when it is not there. Raises PullError."""
    repo, file = parse_spec(spec)
    folder = models_folder() / "hf" / repo
    marker = folder / ".complete" / (quote(file, safe="") + ".file" if file else "default")
    if marker.is_file():
        path = folder / marker.read_text()
        if path.exists():
            return path
    files = _choose(repo, file)
    for name in files:
        download_file(repo, name, folder)
    result = files[0] if files[0].endswith(".gguf") else "."
    marker.parent.mkdir(parents=True, exist_ok=True)
    marker.write_text(result)
    return folder / result


def fetch_config(spec: str) -> Path:
    """The config.json of ``spec`` alone, of a model that has safetensors: what it takes to size it. Raises PullError."""
    repo, file = parse_spec(spec)
    if file is not None:
        raise PullError(f"{spec}: one file cannot be sized before it is there; fetch its first part, or the whole (octavo pull {spec})")
    names = _list_files(repo)
    if "config.json" not in names:
        raise PullError(f"hf:{repo} has no config.json to size it by; pull one of its files, or fetch the first part of one")
    return download_file(repo, "config.json", models_folder() / ".configs" / repo)  # apart: "models" lists folders with a config


def download_file(repo: str, file: str, folder: Path) -> Path:
    """One file of a repo into ``folder``; a partial one goes on where it stopped. Raises PullError."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError

    try:
        return Path(hf_hub_download(repo, file, local_dir=folder))
    except (HfHubHTTPError, OSError, ValueError) as e:
        raise PullError(f"hf:{repo}:{file} could not be downloaded: {_one_line(e)}") from e


def _list_files(repo: str) -> list[str]:
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    try:
        return HfApi().list_repo_files(repo)
    except (HfHubHTTPError, OSError, ValueError) as e:
        raise PullError(f"hf:{repo} could not be listed: {_one_line(e)}") from e


def _choose(repo: str, file: str | None) -> list[str]:
    """The files to fetch: the named GGUF (all its parts), else the repo's only or preferred one, else a safetensors model's."""
    names = _list_files(repo)
    ggufs = sorted(n for n in names if n.endswith(".gguf"))
    if file is not None:
        if file not in names:
            raise NoSuchModel(f"hf:{repo} has no file {file!r}; it has {', '.join(ggufs) or ', '.join(sorted(names)[:20])}")
        return _parts(file)
    if ggufs:
        firsts = [n for n in ggufs if not _SPLIT.fullmatch(n) or "-00001-of-" in n]
        preferred = [n for n in firsts if _PREFERRED in n.lower()] or firsts
        if len(preferred) != 1:
            raise NoSuchModel(f"hf:{repo} has several models; name one as hf:{repo}:FILE of {', '.join(firsts)}")
        return _parts(preferred[0])
    weights = _safetensors(names)
    if not weights or "config.json" not in names:
        raise NoSuchModel(f"hf:{repo} holds neither a GGUF file nor config.json with safetensors")
    return [n for n in _FOLDER_FILES if n in names] + weights


def _safetensors(names: list[str]) -> list[str]:
    """The weights that a loader opens: the sharded model with its index, else the single file; never both, nothing in subfolders."""
    index = "model.safetensors.index.json"
    if index in names:
        return [index, *(n for n in names if re.fullmatch(r"model-\d{5}-of-\d{5}\.safetensors", n))]
    return [n for n in names if n == "model.safetensors"]


def _parts(file: str) -> list[str]:
    match = _SPLIT.fullmatch(file)
    if match is None:
        return [file]
    return [f"{match['stem']}-{i:05d}-of-{match['count']}.gguf" for i in range(1, int(match["count"]) + 1)]


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__
