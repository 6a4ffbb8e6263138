"""A child process that serves the scripted model: ``python -m tests.server.serve_scripted DRAIN_S STEP_DELAY_S``.

It prints its port when it is ready. Its steps go through the gate of its environment, if there is one.
"""

from __future__ import annotations

import socket
import sys

from octavo.engine.async_engine import AsyncEngine
from octavo.server.app import ServerOptions, create_app
from octavo.server.run import make_server
from tests.engine.scripted import Bigram, bigram_engine
from tests.engine.step_gate import GatedSteps


def main(drain_s: float, delay_s: float) -> None:
    engine = bigram_engine(max_num_seqs=4)
    assert isinstance(engine.backend, Bigram)
    engine.backend.delay_s = delay_s
    engine.backend.before_step = GatedSteps.of_environment()
    async_engine = AsyncEngine(engine)
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    options = ServerOptions(drain_s=drain_s)
    make_server(create_app(async_engine, options), async_engine, options, ready_message=str(port)).run(sockets=[listener])


if __name__ == "__main__":
    main(float(sys.argv[1]), float(sys.argv[2]))
