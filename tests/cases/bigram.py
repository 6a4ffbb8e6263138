"""A model file whose next token depends on the last one alone, so that outputs can be scripted and every probability is known.

Its hidden size is its vocabulary, its embedding the identity, and attention and MLP write nothing; so the logits after a token are one
column of the output matrix, times sqrt(hidden) from the last norm. Tokens are the control tokens, the 256 bytes, and the pieces named.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from tests.models.tiny import CONTROL_TOKENS, byte_alphabet, byte_vocabulary, write_tiny_gguf

SIZE = 288  # vocabulary and hidden
SURE = 30.0  # logit of what follows surely
Logits = Mapping[int, Mapping[int, float]]
"""last token -> next token -> logit; the others are low."""


def byte_id(character: str) -> int:
    (value,) = character.encode()
    return len(CONTROL_TOKENS) + value


def piece_id(pieces: Sequence[str], piece: str) -> int:
    return byte_vocabulary(pieces)[0].index("".join(byte_alphabet()[b] for b in piece.encode()))


def then(*token_ids: int) -> dict[int, dict[int, float]]:
    """Each of these tokens is followed by the next one, almost surely."""
    return {token: {following: SURE} for token, following in zip(token_ids, token_ids[1:], strict=False)}


def write_bigram(
    path: Path,
    logits: Logits,
    otherwise: Mapping[int, float],
    pieces: Sequence[str] = (),
    *,
    low: float = -10.0,
    size: int = SIZE,
    metadata: Mapping[str, Any] | None = None,
) -> Path:
    """``otherwise``: the logits after tokens that ``logits`` does not name. ``low``: those of next tokens that nothing is said of.

    ``size``: a multiple of 32; rows behind the tokens are named as converters name padding. ``metadata`` replaces values.
    """
    layers = 2
    columns = np.full((size, size), low, np.float32)  # [next, last]
    for last in range(size):
        for following, logit in logits.get(last, otherwise).items():
            columns[following, last] = logit
    zero = np.zeros((size, size), np.float32)
    tensors = {
        "token_embd.weight": np.eye(size, dtype=np.float32),
        "output.weight": columns / np.float32(np.sqrt(size)),
        "output_norm.weight": np.ones(size, np.float32),
        **{f"blk.{i}.attn_output.weight": zero for i in range(layers)},
        **{f"blk.{i}.ffn_down.weight": zero[:, :32] for i in range(layers)},
    }
    tokens, merges = byte_vocabulary(pieces)
    unused = size - len(tokens)
    kinds = [gguf.TokenType.CONTROL] * len(CONTROL_TOKENS) + [gguf.TokenType.NORMAL] * (len(tokens) - len(CONTROL_TOKENS))
    vocabulary: dict[str, Any] = {
        "tokenizer.ggml.tokens": tokens + [f"[PAD{i}]" for i in range(len(tokens), size)],
        "tokenizer.ggml.token_type": [int(kind) for kind in kinds] + [int(gguf.TokenType.UNUSED)] * unused,
        "tokenizer.ggml.merges": merges,
    }
    sizes = {"layers": layers, "hidden": size, "heads": size // 32, "kv_heads": 1, "ffn": 32, "vocab": size}
    return write_tiny_gguf(path, **sizes, metadata_overrides=vocabulary | dict(metadata or {}), tensors=tensors)
