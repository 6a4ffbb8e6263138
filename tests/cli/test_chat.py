"""`octavo chat`: several turns over a pipe, and Ctrl-C on a real terminal."""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from octavo import LLM, SamplingParams
from octavo.cli.chat import HELP
from octavo.cli.run import DEFAULT_SYSTEM
from tests.cli.conftest import Octavo

GREEDY = SamplingParams(temperature=0, max_tokens=6)
ROOT = Path(__file__).parents[2]
TIMEOUT_S = 120.0  # hangs are found, slow machines are forgiven


def say(octavo: Octavo, tiny: Path, *lines: str, flags: tuple[str, ...] = ()) -> list[str]:
    """What the program printed after each line, the first entry before the first."""
    argv = ("chat", "--model", tiny, "--temperature", "0", "--max-tokens", "6", *flags)
    ended = octavo(*argv, stdin="".join(line + "\n" for line in lines))
    assert ended.code == 0 and ended.err == ""
    return ended.out.split("> ")


def expected(llm: LLM, *turns: str, system: str = DEFAULT_SYSTEM) -> list[str]:
    """Answers to ``turns``, each with all messages before it."""
    messages = [{"role": "system", "content": system}] if system else []
    answers = []
    for turn in turns:
        messages.append({"role": "user", "content": turn})
        answers.append("".join(event.text for event in llm.stream_chat(messages, GREEDY)))
        messages.append({"role": "assistant", "content": answers[-1]})
    return answers


@pytest.fixture(scope="module")
def llm(tiny: Path) -> LLM:
    return LLM(str(tiny), num_kv_blocks=64)


def test_each_turn_sees_the_ones_before_until_reset(octavo: Octavo, tiny: Path, llm: LLM) -> None:
    first, second = expected(llm, "hello", "tell me more")
    shown = say(octavo, tiny, "hello", "", "tell me more", "/reset", "hello", "/what", "/exit", "never read")
    assert shown == [HELP + "\n", f"{first} (cut)\n", "", f"{second} (cut)\n", "(forgotten)\n", f"{first} (cut)\n", HELP + "\n", ""]


def test_the_system_message_can_be_changed_or_left_out(octavo: Octavo, tiny: Path, llm: LLM) -> None:
    for system in ("be brief", ""):
        (answer,) = expected(llm, "hello", system=system)
        assert say(octavo, tiny, "hello", flags=("--system", system))[1] == f"{answer} (cut)\n"


def test_a_turn_that_does_not_fit_is_refused_and_forgotten(octavo: Octavo, tiny: Path) -> None:
    lines = "the quick brown fox " * 30 + "\n" + "hello\n"
    argv = ("chat", "--model", tiny, "--temperature", "0", "--max-tokens", "6", "--max-model-len", "80", "--system", "")
    ended = octavo(*argv, stdin=lines)
    assert re.fullmatch(r"octavo: prompt: .* the context is 80 tokens.*\(/reset starts anew\)\n", ended.err)
    alone = octavo(*argv, stdin="hello\n")
    assert ended.code == 0 and ended.out.split("> ")[2] == alone.out.split("> ")[1]


class Terminal:
    """`octavo chat` on a pseudo-terminal."""

    def __init__(self, *argv: str) -> None:
        self.fd, child_fd = pty.openpty()
        env = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "TERM": "dumb"}
        command = [sys.executable, "-m", "octavo.cli.main", "chat", *argv]
        # A session of its own with the terminal as its controlling one, so that ^C becomes a signal.
        self.process = subprocess.Popen(
            command,
            stdin=child_fd,
            stdout=child_fd,
            stderr=child_fd,
            env=env,
            start_new_session=True,
            preexec_fn=lambda: _take_terminal(child_fd),
        )
        os.close(child_fd)
        self.seen = ""

    def type(self, text: str) -> None:
        os.write(self.fd, text.encode())

    def wait_for(self, pattern: str, again: str = "") -> str:
        """Everything up to the end of the first match; later calls go on from there. ``again`` is typed now and then until it comes."""
        deadline = time.monotonic() + TIMEOUT_S
        while not (found := re.search(pattern, self.seen, re.DOTALL)):
            assert time.monotonic() < deadline, f"waited in vain for {pattern!r}; there is {self.seen[-500:]!r}"
            ready, _, _ = select.select([self.fd], [], [], 1.0)
            if ready:
                self.seen += os.read(self.fd, 65536).decode(errors="replace")
            elif again:
                self.type(again)
        before, self.seen = self.seen[: found.end()], self.seen[found.end() :]
        return before


def _take_terminal(fd: int) -> None:
    import fcntl
    import termios

    fcntl.ioctl(fd, termios.TIOCSCTTY, 0)


@pytest.fixture
def terminal(tiny: Path) -> Iterator[Terminal]:
    t = Terminal("--model", str(tiny), "--temperature", "0", "--max-tokens", "16000")
    try:
        yield t
    finally:
        t.process.kill()
        t.process.wait()
        os.close(t.fd)


def test_ctrl_c_stops_the_answer_and_not_the_program(terminal: Terminal) -> None:
    terminal.wait_for("> ")
    for _ in range(2):  # the engine has to be usable after the first
        terminal.type("hello\n")
        terminal.wait_for(r"hello\r\n.{40}")
        terminal.type("\x03")
        terminal.wait_for(r"\(stopped\)\r\n.*> ")
    terminal.type("\x03")
    terminal.wait_for("> ", again="\x03")  # one that comes just before it waits for a line shows when there is a line, or another
    terminal.type("/reset\n")
    terminal.wait_for(r"\(forgotten\)\r\n.*> ")
    assert terminal.process.poll() is None
    terminal.type("\x04")
    assert terminal.process.wait(TIMEOUT_S) == 0


def test_a_run_that_is_interrupted_ends_with_the_exit_code_of_a_signal(tiny: Path) -> None:
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, "-m", "octavo.cli.main", "run", "hello", "--model", str(tiny), "--max-tokens", "16000"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=env)
    assert process.stdout is not None and process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 130 and err.strip() == b""
