"""PagedAttention (Kwon et al., SOSP 2023), table 1: what the KV memory of OPT models holds, and what reservations leave."""

from __future__ import annotations

from octavo.reproduce.figure import ARITHMETIC, Figure, Row
from octavo.reproduce.setup import Setup
from octavo.simulator.dense_models import OPT_13B, OPT_66B, OPT_175B

NUMBER = 2
NAME = "kv-slots"
MAX_MODEL_LEN = 2048
SLOTS = ((OPT_13B, 12, "15.7K"), (OPT_66B, 21, "9.7K"), (OPT_175B, 264, "60.1K"))  # model, GiB of KV memory, published


def run(setup: Setup) -> Figure:
    per_token = OPT_13B.kv_bytes_per_token()
    longest = MAX_MODEL_LEN * per_token
    rows = [
        Row("OPT-13B, KV of one token", "800 KiB", f"{per_token / 1024:g} KiB", per_token == 800 * 1024),
        _printed(f"OPT-13B, KV of {MAX_MODEL_LEN} tokens", "1.6 GB", f"{longest / 2**30:.1f} GB", f" ({longest:,} B)"),
    ]
    for model, gib, published in SLOTS:
        slots = gib * 2**30 / model.kv_bytes_per_token()
        rows.append(_printed(f"{model.name}, slots in {gib} GB", published, f"{slots / 1000:.1f}K", f" ({int(slots):,})"))
    num_slots = 12 * 2**30 // per_token
    num_chunks, left = divmod(num_slots, MAX_MODEL_LEN)
    rows.append(_printed("OPT-13B, requests at once with a reservation of 2,048 tokens each", "7.00", f"{num_chunks:.2f}", ""))
    share = f"{100 * left / num_slots:.1f} %"
    rows.append(_printed("slots left over then (external fragmentation and others)", "8.9 %", share, f" ({left:,} slots)"))
    how = "KV bytes of a token by layers and hidden size, 16 bit; a GB of the table taken as 2**30 bytes, which its figures fit."
    notes = ("The table's 9.7K of OPT-66B would need 21.3 GB; 21 GB are printed, perhaps rounded down.",)
    return Figure(NUMBER, "KV slots of OPT models, and the batch of reservations", ARITHMETIC, how, rows, notes=notes)


def _printed(what: str, published: str, ours: str, more: str) -> Row:
    """Agrees when it is the same to the printed digit."""
    return Row(what, published, ours + more, ours == published)
