"""An engine worker as a Ray actor: Ray finds it a machine and a process; what it works at comes by its channel to the front end.

One of the two files that import Ray. The actor is asked two things in its life, where it is and to run, and nothing per request or step.
It has no state that Ray should restore: a worker that dies is replaced by a new actor, wherever there is room then.
"""

from __future__ import annotations

from dataclasses import dataclass

import ray.util

from octavo.distributed.worker import HOPELESS_ERRORS, WorkerPost, is_passing, run_worker


@dataclass(frozen=True, slots=True)
class WorkerEnd:
    """Why a worker has ended. ``hopeless``: another one would end alike."""

    reason: str
    hopeless: bool = False


class WorkerActor:
    """Lives as long as its worker; ``ray_cluster`` makes a remote class of it, with what the worker needs of a node."""

    def where(self) -> str:
        """The address of its node, as Ray knows it. An answer means that it has a process, and can import what it needs."""
        return str(ray.util.get_node_ip_address())

    def run(self, post: WorkerPost) -> WorkerEnd:
        """Work until the front end says that it is enough. Raises what ``run_worker`` does, but for what no other try would help."""
        try:
            return WorkerEnd(run_worker(post))
        except HOPELESS_ERRORS as error:
            if is_passing(error):
                raise
            return WorkerEnd(str(error), hopeless=True)
