"""Who deals with what workers say and what becomes of them: what ``Control`` needs of a front end."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from octavo.distributed.attempts import Loss
from octavo.distributed.messages import FromWorker, Keys

if TYPE_CHECKING:
    from octavo.distributed.link import Link


class ControlHandler(Protocol):
    """Who deals with what workers say of attempts."""

    def worker_ready(self, link: Link) -> None:
        """It takes requests from now on."""
        ...

    def worker_lost(self, link: Link, loss: Loss) -> None:
        """Nothing that it says of its attempts counts any more. It may speak again (``worker_ready``), unless its channel is closed."""
        ...

    def worker_gone(self, link: Link) -> None:
        """Its channel is closed, after ``worker_lost``."""
        ...

    def worker_leaves(self, link: Link) -> None:
        """It wants to end, and has been told to take nothing more."""
        ...

    def told(self, link: Link) -> None:
        """Its load has changed."""
        ...

    def told_keys(self, link: Link, message: Keys) -> None:
        """Its prefix cache has changed."""
        ...

    def said(self, link: Link, message: FromWorker) -> None:
        """Anything else, from a worker that is trusted."""
        ...

    def is_amid_answers(self) -> bool:
        """There are answers that have been sent in part, and can only go on as they began."""
        ...

    def fault(self, error: Exception) -> None:
        """A fault of ours has come up in dealing with a message: the worker is not to blame."""
        ...
