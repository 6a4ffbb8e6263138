"""Small vocabularies for tokenizer tests: bytes, SentencePiece-style and trained byte-level BPE, as GGUF metadata."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from tokenizers import Tokenizer as HFTokenizer
from tokenizers import models, pre_tokenizers, trainers

from octavo.models.vocabulary import byte_level_alphabet

NORMAL, UNKNOWN, CONTROL, USER, BYTE = 1, 2, 3, 4, 6
BLANK = "\u2581"

NASTY_TEXTS = [
    "",
    " ",
    "I'll can't we've IT'S he'd I'M you'RE 'tis ''s don’t",
    "0 12 345 6789 01234567890 3.14e-10 1,000,000 0xDEADBEEF ½ ٣٤ Ⅷ ²",
    "tabs\tand\nnewlines\r\n\r\n  trailing  \n \n\n\n\t\t x",
    "   leading,    runs     of      blanks   ",
    "中文字符和日本語のテキスト、한국어，「」。！ 中 文",
    "👨‍👩‍👧‍👦 family 🇻🇳🇫🇷 👍🏽😀字!",
    "e\u0301 vs é, naïve café ﬁ Å\u030a \u00a0nbsp \u200bzwsp \u3000wide",
    "\u0627\u064e\u0644\u0652\u0639\u064e\u0631\u064e\u0628\u0650 हिन्दी ไทย עברית",
    "Ωμέγα ὴΐ Привет ЁЖИК straße ÀÉÎ ǅ İi",
    "CamelCaseWords snake_case_words path/to/file.py?q=1&x=[2] {a: 'b'} #include <stdio.h>\n// ok\n",
    "a\x00b\x7f\x1b[0m \ufeff \ud7ff\ue000 \U0010ffff",
    "!?!?... --- *** $$$ ~`^ <|im_start|> <s> </s>",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    "ends in newline\n",
    "ends in blanks   ",
    "½   ",
    "😀 😀 😀 😀  😀  ",
    "😀!! x+y=2²  ",
    "Στίγμα Ωμέγα: ΣΣ σς",
]


def gguf(kind: str, pieces: Sequence[str | bytes], kinds: Sequence[int], **keys: Any) -> dict[str, Any]:
    """Metadata with the given tokenizer.ggml.* keys; ``keys`` win over the rest, and a value of None leaves the key out."""
    given = {"model": kind, "tokens": list(pieces), "token_type": list(kinds), **keys}
    return {f"tokenizer.ggml.{key}": value for key, value in given.items() if value is not None}


def bytes_metadata(pieces: Sequence[str] = (), **keys: Any) -> dict[str, Any]:
    """The 256 single bytes (id = byte), <s> 256, </s> 257, the token "hi" 258 (the only merge), then ``pieces``."""
    tokens = [*byte_level_alphabet(), "<s>", "</s>", "hi", *pieces]
    kinds = [NORMAL] * 256 + [CONTROL] * 2 + [NORMAL] * (1 + len(pieces))
    return gguf("gpt2", tokens, kinds, **{"pre": "gpt-2", "merges": ["h i"], "bos_token_id": 256, "eos_token_id": 257, **keys})


def spm_metadata(pieces: Sequence[str], byte_tokens: bool = True, **keys: Any) -> dict[str, Any]:
    """<unk> 0, <s> 1, </s> 2, <0x00>..<0xFF> 3..258, then ``pieces``, each scored by its place (earlier is better)."""
    low = [f"<0x{byte:02X}>" for byte in range(256)] if byte_tokens else []
    tokens = ["<unk>", "<s>", "</s>", *low, *pieces]
    kinds = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * len(low), *[NORMAL] * len(pieces)]
    scores = [0.0] * (3 + len(low)) + [-float(i) for i in range(len(pieces))]
    return gguf("llama", tokens, kinds, **{"scores": scores, "bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0, **keys})


def trained_metadata(reference: HFTokenizer, pre: str | None, texts: Sequence[str], num_tokens: int = 900) -> dict[str, Any]:
    """Give ``reference`` a vocabulary learnt from ``texts``, and the same as a GGUF file has it; id 0 is the control token <|im_start|>.

    Learnt without splitting, so that merges reach over every border between pieces: a piece split wrongly gives other ids.
    """
    unsplit = HFTokenizer(models.BPE({}, []))
    unsplit.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    trainer = trainers.BpeTrainer(
        vocab_size=num_tokens,
        special_tokens=["<|im_start|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    parts = [text[start : start + length] for text in texts for length in (2, 3, 5, 9) for start in range(len(text))]
    unsplit.train_from_iterator(parts, trainer)
    model = json.loads(unsplit.to_str())["model"]
    merges = [tuple(merge.split(" ")) if isinstance(merge, str) else tuple(merge) for merge in model["merges"]]
    reference.model = models.BPE(model["vocab"], merges, ignore_merges=reference.model.ignore_merges)
    reference.add_special_tokens(["<|im_start|>"])
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    kinds = [CONTROL if token == "<|im_start|>" else NORMAL for token in tokens]
    return gguf("gpt2", tokens, kinds, pre=pre, merges=[" ".join(merge) for merge in merges], bos_token_id=0, eos_token_id=0)
