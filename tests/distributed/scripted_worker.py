"""A worker process on a model of known probabilities: ``python -m tests.distributed.scripted_worker``, flags as `octavo worker`'s.

Its logits are random and the same in every process (``random_logits``). $OCTAVO_TEST_DELAY_S is slept in each step; and steps go through
the gate of the environment, if there is one.
"""

from __future__ import annotations

import os
import sys

import click
import numpy as np

from octavo.cli.worker import run
from octavo.config import EngineConfig
from octavo.distributed.channel import Address
from octavo.distributed.handshake import read_secret
from octavo.distributed.worker import WorkerOptions, WorkerServer
from octavo.engine.engine import Engine
from tests.engine.scripted import Bigram, bigram_model, byte_tokenizer
from tests.engine.step_gate import GatedSteps

PIECES = ("hello", " world", " stop", "ping", "ab", "cd", "é", "😀")


def random_logits(vocab_size: int) -> np.ndarray:
    """[vocab_size, vocab_size]: a few likely followers of each token, so that samples repeat now and then."""
    rng = np.random.default_rng(7)
    return (rng.standard_normal((vocab_size, vocab_size)) * 3.0).astype(np.float32)


def load(config: EngineConfig) -> Engine:
    tokenizer = byte_tokenizer(PIECES)
    backend = Bigram(tokenizer.vocab_size, config.scheduler.max_num_seqs)
    backend.logits = random_logits(tokenizer.vocab_size)
    backend.delay_s = float(os.environ.get("OCTAVO_TEST_DELAY_S", "0"))
    backend.before_step = GatedSteps.of_environment()
    return Engine(bigram_model(tokenizer), config, backend)


@click.command()
@click.option("--connect", required=True)
@click.option("--name", required=True)
@click.option("--role", default="both")
@click.option("--threads", type=int)
@click.option("--give-up-s", type=float)
@click.option("--parent", type=int)
def main(connect: str, name: str, role: str, threads: int | None, give_up_s: float | None, parent: int | None) -> None:
    options = WorkerOptions(name, role, threads, give_up_s=give_up_s, parent=parent)
    sys.exit(run(WorkerServer(Address.parse(connect), read_secret(), options, load)))


if __name__ == "__main__":
    main()
