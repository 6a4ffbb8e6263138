"""An engine worker as a Ray actor: Ray finds it a machine and a process; what it works at comes by its channel to the front end.

One of the two files that import Ray. The actor is asked two things in its life, where it is and to run, and nothing per request or step.
It has no state that Ray should restore: a worker that dies is replaced by a new actor, wherever there is room then.
"""

from __future__ import annotations

from dataclasses import dataclass

import ray
import ray.util

from octavo.distributed.channel import Address


@dataclass(frozen=True, slots=True)
class WorkerPost:
    """What a worker has to know: its name and role, the front end's address and the secret. ``threads`` None: as the front end says."""

    name: str
    role: str
    address: Address
    secret: bytes
    threads: int | None = None


class WorkerActor:
    """Lives as long as its worker; to be made by ``ray.remote`` with its resources."""

    def where(self) -> str:
        """The address of its node, as Ray knows it: it has a process, and can import what it needs."""
        return ray.util.get_node_ip_address()

    def run(self, post: WorkerPost) -> str:
        """Work until the front end says that it is enough; why it ended. Raises RuntimeError when it cannot work for this front end."""
        from octavo.distributed.worker import run_worker

        return run_worker(post)
