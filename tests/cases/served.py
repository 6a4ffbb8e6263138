"""A model file behind the real server on a real socket, and the real openai client for it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import openai

from octavo.engine.engine import Engine
from octavo.engine.llm import make_config
from tests.server.harness import TIMEOUT_S, RunningServer, wait_until


@contextmanager
def served(path: Path, **options: Any) -> Iterator[tuple[RunningServer, openai.OpenAI]]:
    """The model is called m; options are those of EngineConfig's sections. At the end every block is back and the books agree."""
    config = make_config(str(path), **{"num_kv_blocks": 256, "threads": 1, **options})
    engine = Engine.load(replace(config, model=replace(config.model, served_model_name="m")))
    with RunningServer(engine) as server:
        with openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none", max_retries=0, timeout=TIMEOUT_S) as client:
            yield server, client
        wait_until(server.is_idle)
        scheduler = engine.scheduler
        scheduler.check_invariants()
        assert scheduler.num_free_blocks + scheduler.num_cached_blocks == scheduler.num_blocks
