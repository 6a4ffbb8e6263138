"""Which figures there are: one line for each, and the module that makes it. Imports a figure's module only when the figure is made.

A module of ``octavo.reproduce`` that makes a figure has

    NUMBER: int                                      # in the list of figures that are rebuilt
    NAME: str                                        # as here
    def run(setup: Setup) -> Figure | list[Figure]   # all of the entry's kind of evidence

A published figure of which we have two kinds of evidence has two entries.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from importlib import import_module

from octavo.reproduce.figure import ARITHMETIC, MEASURED, SIMULATED, Figure
from octavo.reproduce.setup import Setup


@dataclass(frozen=True, slots=True)
class Entry:
    """``title``: what is rebuilt, in a few words. ``module``: of ``octavo.reproduce``."""

    number: int
    name: str
    evidence: str
    module: str
    title: str

    def run(self, setup: Setup) -> list[Figure]:
        """The figures of this entry, made now."""
        made = import_module(f"octavo.reproduce.{self.module}").run(setup)
        return [made] if isinstance(made, Figure) else list(made)


ENTRIES: tuple[Entry, ...] = (
    Entry(1, "kv-bytes", ARITHMETIC, "kv_bytes", "KV cache of Llama-2-7B"),
    Entry(1, "kv-bytes-engine", MEASURED, "kv_bytes_engine", "KV cache of a model here, as it is allocated"),
    Entry(2, "kv-slots", ARITHMETIC, "kv_slots", "KV slots of OPT models, and the batch of reservations"),
    Entry(3, "orca-mixed", SIMULATED, "orca_mixed", "Iteration-level against request-level batching"),
    Entry(3, "orca-mixed-measured", MEASURED, "orca_mixed_measured", "Iteration-level against request-level batching"),
    Entry(4, "orca-equal", SIMULATED, "orca_equal", "The same with requests that are all alike"),
    Entry(4, "orca-equal-measured", MEASURED, "orca_equal_measured", "The same with requests that are all alike"),
    Entry(5, "kv-use", SIMULATED, "kv_use", "What KV memory is used for, paging against reservations"),
    Entry(5, "kv-use-measured", MEASURED, "kv_use_measured", "What the live KV pool is used for"),
    Entry(6, "batched-sharegpt", SIMULATED, "batched_sharegpt", "Requests at once, ShareGPT"),
    Entry(7, "batched-alpaca", SIMULATED, "batched_alpaca", "Requests at once, Alpaca"),
    Entry(8, "paged-rates", SIMULATED, "paged_rates", "Rates at equal latency, paging against reservations"),
    Entry(8, "paged-rates-measured", MEASURED, "paged_rates_measured", "Rates at similar latency, paging against reservations"),
    Entry(9, "sharing-alpaca", MEASURED, "sharing_alpaca", "Blocks that samples and beams share, lengths of Alpaca"),
    Entry(10, "sharing-sharegpt", MEASURED, "sharing_sharegpt", "Blocks that samples and beams share, lengths of ShareGPT"),
    Entry(11, "prefix-rates", SIMULATED, "prefix_rates", "A shared prefix, kept once"),
    Entry(11, "prefix-rates-measured", MEASURED, "prefix_rates_measured", "A shared prefix, kept once"),
    Entry(12, "chat-rates", SIMULATED, "chat_rates", "A chatbot with its history"),
    Entry(13, "block-size", MEASURED, "block_size", "Throughput by the size of blocks"),
    Entry(13, "recompute-or-swap", MEASURED, "recompute_or_swap", "Recomputing and swapping by the size of blocks"),
    Entry(15, "speculation-formula", ARITHMETIC, "speculation_formula", "Speculative decoding by its formula"),
    Entry(16, "draft-gains", MEASURED, "draft_gains", "Drafts: the gain that alpha and c predict, and the gain"),
    Entry(17, "ngram-alpha", MEASURED, "ngram_alpha", "How often n-gram drafts come true"),
    Entry(18, "bigram-formula", ARITHMETIC, "bigram_formula", "A bigram model as a draft"),
    Entry(18, "bigram-gain", MEASURED, "bigram_gain", "A bigram as a draft, measured"),
    Entry(19, "draft-lengths", MEASURED, "draft_lengths", "How many drafts pay"),
    Entry(20, "attention-arithmetic", ARITHMETIC, "attention_arithmetic", "FlashAttention-2 by arithmetic"),
    Entry(20, "tiled-attention", MEASURED, "tiled_attention", "Attention in tiles: exactness, memory, share of the peak"),
    Entry(21, "trace-lengths", ARITHMETIC, "splitwise_traces", "Lengths of the production traces of Splitwise"),
    Entry(22, "active-tokens", SIMULATED, "splitwise_active_tokens", "Active tokens in a batch at two requests per second"),
    Entry(23, "machine-table", ARITHMETIC, "splitwise_table", "Prompts, batches and token times of BLOOM-176B"),
    Entry(24, "kv-transfer", ARITHMETIC, "splitwise_transfer", "KV transfer in one piece and layer by layer"),
    Entry(24, "kv-transfer-measured", MEASURED, "kv_transfer_measured", "KV transfer in one piece and layer by layer"),
    Entry(25, "aa-a100", SIMULATED, "splitwise_aa_a100", "Splitwise-AA against Baseline-A100"),
    Entry(26, "aa-h100", SIMULATED, "splitwise_aa_h100", "Splitwise-AA against Baseline-H100"),
    Entry(27, "ha-h100", SIMULATED, "splitwise_ha", "Splitwise-HA, HH and HHcap against Baseline-H100"),
    Entry(28, "hhcap-power", SIMULATED, "splitwise_hhcap", "Least power and least cost at equal throughput"),
    Entry(29, "hh-code", SIMULATED, "splitwise_hh_code", "Fewest machines for 70 code requests per second"),
    Entry(30, "robustness", SIMULATED, "splitwise_robustness", "Clusters sized for another load; overload"),
    Entry(31, "chunk-overhead", SIMULATED, "chunk_overhead", "Chunked prefill: its cost, and the gaps it closes"),
    Entry(31, "chunked-prefill", MEASURED, "chunked_prefill", "Prompts in chunks or whole, beside streams or alone"),
    Entry(31, "chunk-overhead-measured", MEASURED, "chunk_overhead_measured", "What chunks cost a prompt, by their size"),
    Entry(33, "disaggregated", SIMULATED, "disaggregated", "Prefill and decode apart, goodput"),
)

NOT_HERE: dict[int, str] = {
    14: "the overhead of a paged kernel on a GPU against another library's: it needs that GPU and that library",
    32: "Sarathi-Serve's capacities are of four models on A100s and A40s: they need these GPUs",
}


def select(words: Seq[str]) -> list[Entry]:
    """The entries that ``words`` name, in the order of the registry: a name, a number, a kind of evidence (its first word), or "all".

    Raises ValueError for a word that names none.
    """
    chosen = set[Entry]()
    for word in words:
        found = [entry for entry in ENTRIES if word in ("all", entry.name, str(entry.number), entry.evidence.split()[0])]
        reason = next((why for number, why in NOT_HERE.items() if word == str(number)), None)
        if reason is not None:
            raise ValueError(f"figure: {word} is not made here; {reason}")
        if not found:
            kinds = ", ".join(kind.split()[0] for kind in (ARITHMETIC, SIMULATED, MEASURED))
            raise ValueError(f"figure: {word!r} is not known; a name or number of `octavo reproduce list`, all, or one of {kinds}")
        chosen.update(found)
    return [entry for entry in ENTRIES if entry in chosen]
