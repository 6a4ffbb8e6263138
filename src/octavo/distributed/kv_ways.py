"""By which way KV gets from one worker to another, and to which address: what a front end makes of what it sees and is told of both.

A worker tells where it listens; how others reach that host the front end knows better, since all of them are connected to it:

    listens at                 told to a worker of the same host      told to one that is elsewhere
    10.0.0.2:7071              10.0.0.2:7071                          10.0.0.2:7071
    0.0.0.0:7071, all of them  127.0.0.1:7071                         as the front end sees it; on the front end's own host, as that one
                                                                      sees the front end
    127.0.0.1:7071             127.0.0.1:7071                         nobody: it would reach itself

It reaches nobody itself.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from octavo.distributed.shm_transport import is_near

LOCAL_HOST = "127.0.0.1"


@dataclass(frozen=True, slots=True, eq=False)
class KVPlace:
    """One worker. ``addresses``: where it takes KV, and ``transports``: by which it sends, as it says. ``peer_host``: the address that its
    front end sees it at, and ``front_host``: that it reaches its front end by (None: by a socket of their host)."""

    addresses: Mapping[str, str]
    transports: Sequence[str]
    peer_host: str | None = None
    front_host: str | None = None

    @classmethod
    def told(cls, kv_address: str | None, transports: Sequence[str], peer_host: str | None, front_host: str | None) -> KVPlace:
        """``kv_address`` and ``transports``: as ``messages.Ready`` has them."""
        return cls(addresses_of(kv_address or ""), transports, peer_host, front_host)

    @property
    def is_with_front_end(self) -> bool:
        """They are on one host, as far as can be seen."""
        return self.peer_host is None or is_loopback(self.peer_host) or self.peer_host == self.front_host

    def is_near(self, other: KVPlace) -> bool:
        """Both reach each other by the addresses that no other host reaches them by."""
        if "shm" in self.addresses and "shm" in other.addresses:
            return is_near(self.addresses["shm"], other.addresses["shm"])
        return self.is_with_front_end and other.is_with_front_end


def addresses_of(kv_address: str) -> dict[str, str]:
    """Where a worker takes KV, by transport, as it says: NAME=ADDRESS, separated by blanks."""
    return {name: address for name, equals, address in (part.partition("=") for part in kv_address.split()) if equals}


@lru_cache(maxsize=1 << 14)  # of two that stay as they are; asked again and again for all that waits
def way(sender: KVPlace, receiver: KVPlace, wanted: str) -> tuple[str, str] | None:
    """(transport, the receiver's address for this sender); None: there is none. ``wanted`` auto: shared memory where both are on one host,
    else TCP."""
    for name in ("shm", "tcp") if wanted == "auto" else (wanted,):
        address = _tcp_address(sender, receiver) if name == "tcp" else _shm_address(sender, receiver)
        if address is not None and name in sender.transports:
            return name, address
    return None


def _shm_address(sender: KVPlace, receiver: KVPlace) -> str | None:
    return receiver.addresses.get("shm") if "shm" in sender.addresses and sender.is_near(receiver) else None


def _tcp_address(sender: KVPlace, receiver: KVPlace) -> str | None:
    told = receiver.addresses.get("tcp")
    if told is None:
        return None
    host, _, port = told.rpartition(":")
    bare = host.removeprefix("[").removesuffix("]")
    near = sender.is_near(receiver)
    if is_loopback(bare):
        return told if near else None
    if not is_wildcard(bare):
        return told
    seen: str | None
    if near:
        seen = "::1" if ":" in bare else LOCAL_HOST
    elif receiver.is_with_front_end:
        seen = None if sender.is_with_front_end else sender.front_host
    else:
        seen = receiver.peer_host
    if seen is None:
        return None
    return f"[{seen}]:{port}" if ":" in seen else f"{seen}:{port}"


def kv_host_for(listens_at: str, peer_host: str | None) -> str:
    """Where a worker is to listen for KV that is connected to a front end at ``listens_at``, which sees it at ``peer_host``. Empty: at its
    end of that connection. One that came by loopback to a front end for all hosts is to be reached by all hosts as well."""
    return listens_at if peer_host is not None and is_loopback(peer_host) and is_wildcard(listens_at) else ""


def is_loopback(host: str) -> bool:
    """Of an address, or the name that stands for it everywhere."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def is_wildcard(host: str) -> bool:
    """All addresses of a host."""
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False
