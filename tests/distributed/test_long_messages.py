"""A message that takes long on its way: whoever sends it speaks, as far as a front end can tell."""

from __future__ import annotations

import asyncio

from octavo.distributed.channel import connect
from octavo.distributed.fleet import WorkerState
from octavo.distributed.frames import frame
from octavo.distributed.messages import PROTOCOL, Hello, Keys, Ready, encode, to_worker
from tests.distributed.clusters import PATIENT
from tests.distributed.test_lying_workers import LIMITS, SECRET, Cluster, until

LOOK_S = 0.2  # of this test's own clock
PIECE_BYTES = 100


def test_a_worker_is_not_suspected_while_its_message_comes() -> None:
    """Its heartbeats wait behind it. All that it has would move, and the request whose answer is so long from one worker to the next."""

    async def run() -> None:
        async with Cluster() as cluster:
            control = cluster.engine.control
            channel = await connect(control.address, SECRET, to_worker)
            channel.start(lambda messages: None, lambda reason: None)
            for message in (Hello(PROTOCOL, "slow", "both", "here", 1, "boot"), Ready("stub", "bigram/stub", LIMITS)):
                channel.send(message)
            await until(lambda: (link := control.find("slow")) is not None and link.takes_requests)
            link, transport = control.find("slow"), channel._transport
            assert link is not None and transport is not None and control._watch is not None
            control._watch.cancel()
            now, data = control._now(), frame(encode(Keys([bytes(8)] * 4096)))
            pieces = [data[start : start + PIECE_BYTES] for start in range(0, len(data), PIECE_BYTES)]
            assert len(pieces) * LOOK_S > 2 * PATIENT.suspect_s
            for piece in pieces:
                before = link.channel.heard_s
                transport.write(piece)
                await until(lambda before=before: link.channel.heard_s != before)
                now += LOOK_S
                control._look_at(now)
                assert link.takes_requests
            while link.takes_requests:
                now += LOOK_S
                control._look_at(now)
            assert link.worker.state is WorkerState.SUSPECT and link.worker.reason == f"it has said nothing for {PATIENT.suspect_s:g} s"
            channel.close("it is enough")

    asyncio.run(run())
