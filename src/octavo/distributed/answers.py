"""What a worker answers to questions of its front end: reports of its engine, as JSON. Runs beside the steps, and changes nothing."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from octavo.distributed.messages import Answer, Ask
from octavo.engine.engine import Engine
from octavo.engine.reports import EngineReports

logger = logging.getLogger("octavo.worker")

# what is asked -> the report; arguments are those of ``serving.Reports``
_REPORTS: dict[str, Callable[..., Awaitable[Any]]] = {
    "account": EngineReports.account,
    "requests": EngineReports.requests,
    "summary": EngineReports.summary,
    "metrics": EngineReports.metrics,
}


async def answer(engine: Engine, question: Ask) -> Answer:
    """Never raises: what cannot be answered is an answer with an error. ``args``: those of the report and ``shows_misses``."""
    try:
        args = msgspec.json.decode(question.args, type=dict[str, Any])
        report = _REPORTS[question.what]
        reports = EngineReports(engine, bool(args.pop("shows_misses", False)))
        return Answer(question.number, msgspec.json.encode(await report(reports, **args)))
    except KeyError:
        return Answer(question.number, error=f"what: {question.what!r} is not allowed; one of {', '.join(_REPORTS)}")
    except Exception as error:
        logger.warning("a question for %s cannot be answered", question.what, exc_info=error)
        return Answer(question.number, error=f"{type(error).__name__}: {error}")
