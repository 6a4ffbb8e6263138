"""Several hosts on one machine: network namespaces that are joined by a bridge, for tests and benches of what goes between machines.

    this process ── bridge (.1) ──┬── veth ── host 0 (.2)
                                  ├── veth ── host 1 (.3)
                                  └── ...

Owns the namespaces, their links (up, down, throttled) and the processes that are started in them; all of it goes when the ``with`` block
ends, however it ends, and what a process that was killed has left goes with the next network. It needs root and the `ip` command, `tc` to
throttle; ``missing`` says what is not there. It never touches another link, address or namespace than those it has made.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from types import TracebackType
from typing import Any

PREFIX = "oct"  # of names, of at most 15 characters: then the process id in base 36, N and the network's number, H and the host's
MAX_HOSTS = 64
STOP_S = 10.0
_SUBNETS = 512  # of 198.18.0.0/15, which is set apart for benchmarks (RFC 2544) and routed nowhere
_SEARCH = ("/usr/sbin", "/sbin")
_numbers = itertools.count()


class NetworkError(RuntimeError):
    """A command that builds the network failed; the message has the command and what it said."""


@cache
def missing() -> str | None:
    """Why no network can be made here, or None: asks by making a namespace and taking it away again."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if _command("ip") is None:
        return "network namespaces need the ip command"
    name = f"{PREFIX}{_base36(os.getpid())}N"
    try:
        _ip("netns", "add", name)
    except NetworkError as error:
        return f"no network namespace can be made: {error}"
    _ip("netns", "del", name)
    return None


@dataclass(eq=False, slots=True)
class Host:
    """One namespace. ``address``: its own, which the other hosts and this process reach."""

    name: str
    address: str
    link: str  # the end of its link that is outside the namespace
    processes: list[subprocess.Popen[Any]] = field(default_factory=list)

    def command(self, argv: Sequence[str]) -> list[str]:
        """``argv`` as it is run in the namespace. The process that results is the program itself, with no parent in between."""
        return [_needed("ip"), "netns", "exec", self.name, *argv]

    def popen(self, argv: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        """A process in the namespace; it is killed when the network ends."""
        process = subprocess.Popen(self.command(argv), **options)
        self.processes.append(process)
        return process

    def run(self, argv: Sequence[str], timeout_s: float = 60.0) -> str:
        """What a command in the namespace prints. Raises NetworkError when it fails."""
        return _run(self.command(argv), timeout_s)

    def set_link(self, up: bool) -> None:
        """Plug the cable in or pull it: addresses, routes and connections stay, packets are lost."""
        _ip("link", "set", self.link, "up" if up else "down")

    def throttle(self, gbit_per_s: float | None) -> None:
        """Limit both directions of the link, by a token bucket; None: as fast as the machine can. Raises ValueError, NetworkError."""
        if gbit_per_s is not None and not gbit_per_s > 0:
            raise ValueError(f"gbit_per_s: {gbit_per_s!r} is not allowed; above 0")
        _throttle([_needed("tc")], self.link, gbit_per_s)
        _throttle(self.command([_needed("tc")]), "eth0", gbit_per_s)


class Network:
    """``with Network(3) as network``: three hosts, and this process at ``network.address``. Raises NetworkError, ValueError."""

    def __init__(self, num_hosts: int) -> None:
        if not 1 <= num_hosts <= MAX_HOSTS:
            raise ValueError(f"num_hosts: {num_hosts!r} is not allowed; from 1 to {MAX_HOSTS}")
        self._name = f"{PREFIX}{_base36(os.getpid())}N{next(_numbers)}"
        self._num_hosts = num_hosts
        self.address = ""
        self.hosts: list[Host] = []

    def __enter__(self) -> Network:
        reason = missing()
        if reason is not None:
            raise NetworkError(reason)
        sweep()
        try:
            self._build()
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._remove()

    def _build(self) -> None:
        subnet = _free_subnet()
        self.address = f"{subnet}.1"
        _ip("link", "add", self._name, "type", "bridge")
        _ip("addr", "add", f"{self.address}/24", "dev", self._name)
        _ip("link", "set", self._name, "up")
        for number in range(self._num_hosts):
            self._add_host(number, f"{subnet}.{number + 2}")

    def _add_host(self, number: int, address: str) -> None:
        name = f"{self._name}H{_base36(number)}"
        host = Host(name, address, name)
        _ip("netns", "add", name)
        self.hosts.append(host)
        _ip("link", "add", name, "type", "veth", "peer", "name", "eth0", "netns", name)
        _ip("link", "set", name, "master", self._name, "up")
        for arguments in (("addr", "add", f"{address}/24", "dev", "eth0"), ("link", "set", "eth0", "up"), ("link", "set", "lo", "up")):
            _ip("-n", name, *arguments)

    def _remove(self) -> None:
        """Everything, even when a part of it cannot be taken away: that is for the next ``sweep``."""
        for host in self.hosts:
            for process in host.processes:
                _end(process)
            _kill_all(host.name)
            with contextlib.suppress(NetworkError):
                _ip("link", "del", host.link)  # at once: those of a deleted namespace go when the kernel gets round to it
            with contextlib.suppress(NetworkError):
                _ip("netns", "del", host.name)
        self.hosts.clear()
        with contextlib.suppress(NetworkError):
            _ip("link", "del", self._name)


def sweep() -> None:
    """Take away what processes have left that are no more."""
    names = [entry["name"] for entry in _listed("netns", "list")]
    links = [entry["ifname"] for entry in _listed("link", "show")]
    for kind, found in (("netns", names), ("link", links)):
        for name in found:
            made = re.fullmatch(rf"{PREFIX}([0-9a-z]+)N\d*(?:H[0-9a-z]+)?", name)
            if made is not None and not os.path.exists(f"/proc/{int(made[1], 36)}"):
                if kind == "netns":
                    _kill_all(name)
                with contextlib.suppress(NetworkError):
                    _ip(kind, "del", name)


def _kill_all(namespace: str) -> None:
    """Whatever runs in a namespace of ours: children of what was started there, too."""
    with contextlib.suppress(NetworkError):
        for pid in _ip("netns", "pids", namespace).split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)


def _end(process: subprocess.Popen[Any]) -> None:
    if process.poll() is None:
        process.kill()  # SIGKILL ends a stopped process too
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(STOP_S)


def _throttle(tc: list[str], link: str, gbit_per_s: float | None) -> None:
    """The bucket holds what the link moves in a millisecond, in which the kernel's timer comes round, at the least one large segment: what
    goes after a rest is ahead of a real link by that."""
    if gbit_per_s is None:
        with contextlib.suppress(NetworkError):  # there was none
            _run([*tc, "qdisc", "del", "dev", link, "root"])
        return
    bits = int(gbit_per_s * 1e9)
    burst_bytes = max(128 << 10, bits // 8 // 1000)
    rate = ["rate", f"{bits}bit", "burst", str(burst_bytes), "latency", "50ms"]
    _run([*tc, "qdisc", "replace", "dev", link, "root", "tbf", *rate])


def _free_subnet() -> str:
    """The first three numbers of a subnet that nobody uses here; which one is tried first goes by the process."""
    used = {info.get("local", "").rpartition(".")[0] for entry in _listed("addr", "show") for info in entry.get("addr_info", [])}
    for attempt in range(_SUBNETS):
        number = (os.getpid() + attempt) % _SUBNETS
        subnet = f"198.{18 + number // 256}.{number % 256}"
        if subnet not in used:
            return subnet
    raise NetworkError("every subnet of 198.18.0.0/15 is in use")


def _listed(*arguments: str) -> list[dict[str, Any]]:
    """What `ip -j` says; it says nothing at all where there is nothing."""
    text = _run([_needed("ip"), "-j", *arguments]).strip()
    found = json.loads(text) if text else []
    return [entry for entry in found if entry]


def _ip(*arguments: str) -> str:
    return _run([_needed("ip"), *arguments])


def _run(argv: list[str], timeout_s: float = 60.0) -> str:
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=timeout_s, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NetworkError(f"{' '.join(argv)}: {error}") from None
    if done.returncode != 0:
        raise NetworkError(f"{' '.join(argv)}: {(done.stderr or done.stdout).strip() or f'exit status {done.returncode}'}")
    return done.stdout


def _needed(name: str) -> str:
    found = _command(name)
    if found is None:
        raise NetworkError(f"the {name} command is needed, and is not on this machine")
    return found


@cache
def _command(name: str) -> str | None:
    return shutil.which(name) or shutil.which(name, path=os.pathsep.join(_SEARCH))


def _base36(number: int) -> str:
    digits = ""
    while True:
        number, digit = divmod(number, 36)
        digits = "0123456789abcdefghijklmnopqrstuvwxyz"[digit] + digits
        if not number:
            return digits
