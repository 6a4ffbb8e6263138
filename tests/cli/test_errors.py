"""Mistakes of a user: one message that names what is wrong and what would be right, a fitting exit code, never a trace."""

from __future__ import annotations

import re
import socket
from pathlib import Path

import pytest

from octavo.models import catalog
from tests.cli.conftest import Octavo

BAD_COMMAND_LINES = [
    (["frob"], r"'frob' is no command; there are: run, chat, serve, cluster, worker, pull, .*reproduce, .*top, bench"),
    (["run"], r"Missing argument 'PROMPT'"),
    (["run", "hi", "--frob"], r"[Nn]o such option.*--frob"),
    (["run", "hi", "--temperature", "hot"], r"'--temperature': 'hot' is not a valid float"),
    (["run", "hi", "--temperature", "-1"], r"'--temperature': -1.0 is not allowed; a number from 0 to 100"),
    (["run", "hi", "--top-p", "7"], r"'--top-p': 7.0 is not allowed"),
    (["run", "hi", "--top-k", "-2"], r"'--top-k': -2 is not allowed"),
    (["run", "hi", "--max-tokens", "0"], r"'--max-tokens': 0 is not in the range"),
    (["run", "hi", "--seed", "99999999999999999999"], r"'--seed': 99999999999999999999 is not allowed; an integer of at most 64 bits"),
    (["run", "hi", "--threads", "0"], r"'--threads': 0 is not allowed; from 1 to 1024"),
    (["run", "hi", "--block-size", "5"], r"'--block-size': 5 is not allowed; a multiple of 16"),
    (["run", "hi", "--max-num-seqs", "600"], r"'--max-num-batched-tokens': 512 is not allowed; at least max_num_seqs \(600\)"),
    (["run", "hi", "--kv-cache-dtype", "q4"], r"'--kv-cache-dtype': 'q4' is not one of 'auto', 'f16', 'bf16', 'f32', 'int8'"),
    (["run", "hi", "--raw", "--system", "x"], r"--system is part of a chat, and --raw makes none"),
    (["chat", "--min-p", "2"], r"'--min-p': 2.0 is not allowed; a number from 0 to 1"),
    (["serve", "--port", "99999"], r"'--port': 99999 is not in the range"),
    (["serve", "--kv-cache-memory", "lots"], r"'--kv-cache-memory': 'lots' is not a size such as 500M or 4GiB"),
    (["serve", "--max-body-size", "1,5M"], r"'--max-body-size': '1,5M' is not a size"),
    (["serve", "--api-key", " "], r"'--api-key': the key is empty"),
    (["bench", "offline", "--output", "1"], r"'--output': 1 is not in the range"),
    (["bench", "offline", "--batch", "5000"], r"'--max-num-seqs': 5000 is not allowed; from 1 to 4096"),
]  # fmt: skip


@pytest.mark.parametrize(("argv", "message"), BAD_COMMAND_LINES, ids=lambda v: " ".join(v) if isinstance(v, list) else "")
def test_a_bad_command_line_is_refused_before_anything_is_fetched(
    octavo: Octavo, monkeypatch: pytest.MonkeyPatch, argv: list[str], message: str
) -> None:
    monkeypatch.setattr(catalog, "ensure_model", lambda *_: pytest.fail("a model was asked for"))
    ended = octavo(*argv)
    assert ended.code == 2 and ended.out == ""
    assert re.search(message, " ".join(ended.err.split())), ended.err
    assert "Try 'octavo" in ended.err


def one_line(err: str) -> str:
    assert err.startswith("octavo: ") and err.count("\n") == 1, err
    return err


def test_a_model_that_is_not_there(octavo: Octavo, tmp_path: Path) -> None:
    for model in ("nosuch", tmp_path / "nosuch.gguf"):
        ended = octavo("run", "hi", "--model", model)
        assert ended.code == 1
        assert re.search(r"'.*nosuch.*' is neither a file, a folder, hf:owner/repo\[:file\], nor one of smollm2", one_line(ended.err))
    assert "'hf:x' is not of the form hf:owner/repo[:file]" in one_line(octavo("pull", "hf:x").err)


def test_a_path_that_is_no_model(octavo: Octavo, tmp_path: Path) -> None:
    text = tmp_path / "notes.txt"
    text.write_text("This is not a model at all.")
    assert "a GGUF file starts with b'GGUF'" in one_line(octavo("run", "hi", "--model", text).err)
    assert "holds no config.json" in one_line(octavo("run", "hi", "--model", tmp_path).err)
    (tmp_path / "a.gguf").write_bytes(b"GGUF")
    assert "give the path of a GGUF file in it, such as a.gguf" in one_line(octavo("run", "hi", "--model", tmp_path).err)
    assert "file of 4 bytes is too short" in one_line(octavo("run", "hi", "--model", tmp_path / "a.gguf").err)


def test_sizes_the_model_cannot_have(octavo: Octavo, tiny: Path) -> None:
    ended = octavo("run", "hi", "--model", tiny, "--max-model-len", "999999")
    assert "--max-model-len: 999999 is not allowed; the model was trained for 16384 tokens" in one_line(ended.err)
    ended = octavo("run", "hi", "--model", tiny, "--kv-cache-memory", "5")
    assert re.search(r"--kv-cache-memory: 5 bytes hold no block; one takes \d+", one_line(ended.err))


def test_a_prompt_that_does_not_fit(octavo: Octavo, tiny: Path) -> None:
    ended = octavo("run", "--raw", "the quick brown fox " * 20, "--model", tiny, "--max-model-len", "16")
    assert ended.code == 1 and "the context is 16 tokens" in one_line(ended.err)
    assert "the prompt has no tokens" in one_line(octavo("run", "--raw", "", "--model", tiny).err)


def test_a_kernel_path_the_machine_does_not_have(octavo: Octavo, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_ISA", "sse9")
    assert "OCTAVO_ISA: 'sse9' is not available here; this machine has portable" in one_line(octavo("run", "hi", "--model", tiny).err)


def test_a_port_in_use(octavo: Octavo, tiny: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        ended = octavo("serve", "--model", tiny, "--port", str(port))
    assert ended.code == 1
    assert one_line(ended.err) == f"octavo: port: cannot listen on 127.0.0.1:{port}: Address already in use\n"
    assert "cannot listen on 192.0.2.1:" in one_line(octavo("serve", "--model", tiny, "--host", "192.0.2.1").err)


def test_chat_needs_a_template(octavo: Octavo, tiny_base: Path) -> None:
    ended = octavo("chat", "--model", tiny_base)
    assert ended.code == 2 and "has no chat template; `octavo run` continues a prompt with it" in ended.err
    ended = octavo("run", "hi", "--model", tiny_base, "--system", "be brief")
    assert ended.code == 2 and "so it takes no system message" in ended.err
