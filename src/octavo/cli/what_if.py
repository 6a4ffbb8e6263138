"""Replays a recorded window in a process of its own, at low priority: an engine that serves is not to be slowed by the question what would
help it.

Owns that process: what it is told, how long it may take, and what is made of the lines it says. ``simulator.what_if`` is what runs there.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from dataclasses import replace
from typing import Any

import msgspec

from octavo.core.recorded_window import SwitchOutcome, WindowReplay
from octavo.engine.replay_advice import ReplayError, Window

LIMIT_S = 120.0  # a machine that is busy serving gives a process of low priority little
_ARGV = [sys.executable, "-m", "octavo.simulator.what_if"]


def replay_window(window: Window, limit_s: float = LIMIT_S) -> WindowReplay:
    """A Replayer. Switches that have not been simulated after ``limit_s`` are left out, and named. Raises ReplayError."""
    told = msgspec.json.encode(window.to_dict())  # quick: whoever serves in this process stands still meanwhile
    with subprocess.Popen(_ARGV, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
        timer = threading.Timer(limit_s, child.kill)
        timer.daemon = True  # a server that ends does not wait for it
        timer.start()
        try:
            said, complaint = child.communicate(told)
        finally:
            timer.cancel()
            child.kill()
    return replay_of_lines(said.decode().splitlines(), complaint.decode(errors="replace"), limit_s)


def replay_of_lines(lines: list[str], complaint: str, limit_s: float) -> WindowReplay:
    """What the lines say; a last one that was cut off is left out. Raises ReplayError when not even the unchanged window is in them."""
    base: WindowReplay | None = None
    outcomes, changes = list[SwitchOutcome](), list[str]()
    for line in lines:
        try:
            said: dict[str, Any] = json.loads(line)
        except ValueError:
            break
        if "error" in said:
            raise ReplayError(said["error"])
        if "switches" in said:
            changes = said["switches"]
        elif "base" in said:
            base = WindowReplay.of_dict(said["base"])
        else:
            outcomes.append(SwitchOutcome.of_dict(said["outcome"]))
    if base is None:
        last = complaint.strip().splitlines()[-1:] or [f"it took longer than {limit_s:g} s"]
        raise ReplayError(f"the window could not be replayed: {last[0]}")
    return replace(base, outcomes=tuple(outcomes), skipped=tuple(changes[len(outcomes) :]))
