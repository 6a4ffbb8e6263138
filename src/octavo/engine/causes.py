"""What the time of a request goes to: the causes, what each means, and which part of the machine or of the load is short when it is large.

Names and texts only; ``timeline`` charges seconds to them, ``explain`` shows them.
"""

from __future__ import annotations

from enum import Enum, IntEnum


class Bottleneck(str, Enum):
    """What is short: several causes each."""

    PREFILL = "prefill_compute"
    DECODE = "decode_memory"
    KV = "kv_capacity"
    QUEUE = "queue"
    CLIENT = "client"
    HOST = "host"
    NETWORK = "network"


class Cause(IntEnum):
    """Each moment of a request is charged to one of these; the value is the place in a record's ``seconds``."""

    PREPARATION = 0
    QUEUED_TOKENS = 1
    QUEUED_KV = 2
    QUEUED_BATCH = 3
    QUEUED_POLICY = 4
    PREFILL = 5
    CACHE_MISS = 6
    DECODE = 7
    DRAFTS = 8
    OTHERS_PREFILL = 9
    OTHERS_DECODE = 10
    PACED = 11
    PREFIX_WAIT = 12
    PREEMPTED = 13
    RECOMPUTED = 14
    SWAPPED = 15
    RESTORED = 16
    MASKS = 17
    SAMPLING = 18
    DETOKENISE = 19
    SCHEDULING = 20
    BETWEEN_STEPS = 21
    FAILED_STEP = 22
    OTHER_PROMPTS = 23
    DELIVERY = 24
    SLOW_READER = 25
    QUEUED_PROMPT = 26
    QUEUED_WORKER = 27
    HAND_OFF = 28
    NETWORK = 29
    WORKER_LOST = 30


NUM_CAUSES = len(Cause)
NAMES = tuple(cause.name.lower() for cause in Cause)

# cause -> (what is short, what the seconds are)
MEANINGS: dict[Cause, tuple[Bottleneck, str]] = {
    Cause.PREPARATION: (Bottleneck.HOST, "reading the body, the chat template, token ids, checks"),
    Cause.QUEUED_TOKENS: (Bottleneck.QUEUE, "queued while the prompts before it used up every step"),
    Cause.QUEUED_PROMPT: (Bottleneck.PREFILL, "queued while one long prompt took most of every step, or behind what piled up meanwhile"),
    Cause.QUEUED_KV: (Bottleneck.KV, "queued because the KV pool was full, or behind what piled up meanwhile"),
    Cause.QUEUED_BATCH: (Bottleneck.QUEUE, "queued because max_num_seqs sequences ran"),
    Cause.QUEUED_POLICY: (Bottleneck.QUEUE, "queued until the running batch had finished (scheduling_policy static)"),
    Cause.PREFILL: (Bottleneck.PREFILL, "its own prompt"),
    Cause.CACHE_MISS: (Bottleneck.PREFILL, "steps that computed prompts which the prefix cache would have had, its own or before its turn"),
    Cause.DECODE: (Bottleneck.DECODE, "its own tokens, at what they cost alone"),
    Cause.DRAFTS: (Bottleneck.DECODE, "drafting and verifying"),
    Cause.OTHERS_PREFILL: (Bottleneck.PREFILL, "in steps that computed prompts of others"),
    Cause.OTHERS_DECODE: (Bottleneck.DECODE, "in steps that computed tokens of others"),
    Cause.PACED: (Bottleneck.PREFILL, "its prompt was held back to keep max_itl_ms for the others"),
    Cause.PREFIX_WAIT: (Bottleneck.PREFILL, "waiting for another request that computed the same beginning"),
    Cause.PREEMPTED: (Bottleneck.KV, "put out of the KV pool, waiting to come back"),
    Cause.RECOMPUTED: (Bottleneck.KV, "steps that computed again what was lost when it or another was put out"),
    Cause.SWAPPED: (Bottleneck.KV, "KV blocks moved to and from host memory (swap_space)"),
    Cause.RESTORED: (Bottleneck.KV, "KV blocks coming back from the tiers"),
    Cause.MASKS: (Bottleneck.HOST, "token masks"),
    Cause.SAMPLING: (Bottleneck.HOST, "drawing tokens"),
    Cause.DETOKENISE: (Bottleneck.HOST, "making text and testing stop strings"),
    Cause.SCHEDULING: (Bottleneck.HOST, "planning steps and keeping the books"),
    Cause.BETWEEN_STEPS: (Bottleneck.HOST, "between steps: events handed over, requests taken in"),
    Cause.FAILED_STEP: (Bottleneck.HOST, "in a step that could not be computed"),
    Cause.OTHER_PROMPTS: (Bottleneck.QUEUE, "done, waiting for the other prompts of the same call"),
    Cause.DELIVERY: (Bottleneck.HOST, "from the last token to the last byte handed to the connection"),
    Cause.SLOW_READER: (Bottleneck.CLIENT, "the client did not take what was written"),
    Cause.QUEUED_WORKER: (Bottleneck.QUEUE, "waiting at the front end: no worker was there, or all had enough to do"),
    Cause.HAND_OFF: (Bottleneck.NETWORK, "its first token drawn, until the worker that was to go on had its KV"),
    Cause.NETWORK: (Bottleneck.NETWORK, "on its way between the front end and a worker, there and back"),
    Cause.WORKER_LOST: (Bottleneck.HOST, "its worker was lost, until another one had made its next token"),
}

BOTTLENECK_OF = tuple(MEANINGS[cause][0] for cause in Cause)

NEEDED = frozenset({Cause.PREPARATION, Cause.PREFILL, Cause.DECODE, Cause.MASKS, Cause.SAMPLING, Cause.DETOKENISE, Cause.SCHEDULING,
                    Cause.BETWEEN_STEPS, Cause.DELIVERY, Cause.NETWORK})  # fmt: skip
"""What a request takes with an engine to itself. Whatever else it takes, somebody or something made it wait."""
