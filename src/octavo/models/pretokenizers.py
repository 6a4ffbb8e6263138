"""How byte-level BPE families split text before merging, by the name GGUF files give in ``tokenizer.ggml.pre``.

Owns the table of names and its defaults. A name outside the table is never guessed silently: the fallback is warned of.
The expressions are those of each family's tokenizer.json; llama.cpp's own (src/llama-vocab.cpp) differ in form where its
regex engine lacks a feature.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import tokenizers

log = logging.getLogger(__name__)

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_REST}"
_QWEN2 = rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_REST}"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# DeepSeek lists the cased letters of an older Unicode version one by one. Code points, because the three Greek range ends
# U+1F7D, U+1FD3 and U+1FDB turn into other characters (and the ranges upside down) when source text is NFC-normalised.
_CASED_LETTERS = (
    "0041-005A 0061-007A 00B5 00C0-00D6 00D8-00F6 00F8-01BA 01BC-01BF 01C4-0293 0295-02AF 0370-0373 0376-0377 037B-037D 037F "
    "0386 0388-038A 038C 038E-03A1 03A3-03F5 03F7-0481 048A-052F 0531-0556 10A0-10C5 13A0-13F5 13F8-13FD 1C90-1CBA 1CBD-1CBF "
    "1D00-1D2B 1D6B-1D77 1D79-1D9A 1E00-1F15 1F18-1F1D 1F20-1F45 1F48-1F4D 1F50-1F57 1F59 1F5B 1F5D 1F5F-1F7D 1F80-1FB4 "
    "1FB6-1FBC 1FBE 1FC2-1FC4 1FC6-1FCC 1FD0-1FD3 1FD6-1FDB 1FE0-1FEC 1FF2-1FF4 1FF6-1FFC 2102 2107 210A-2113 2115 2119-211D "
    "2124 2126 2128 212A-212D 212F-2134 2139 213C-213F 2145-2149 214E 2183-2184 2C00-2C7B 2C7E-2CE4 2CEB-2CEE 2CF2-2CF3 "
    "A640-A66D A680-A69B A722-A76F A771-A787 A78B-A78E AB70-ABBF FB00-FB06 FB13-FB17 FF21-FF3A FF41-FF5A 10400-1044F "
    "104B0-104D3 104D8-104FB 10C80-10CB2 10CC0-10CF2 118A0-118DF 1E900-1E943"
)
_CJK = r"[\u4E00-\u9FA5\u0800-\u4E00\uAC00-\uD7FF]+"


def _code_point_class(ranges: str) -> str:
    """A character class of hexadecimal code points and ranges, in the regex engine's own escapes."""
    return "[" + "".join("-".join(rf"\x{{{point}}}" for point in item.split("-")) for item in ranges.split()) + "]"


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """``patterns`` split one after the other, each within the pieces of the one before; what does not match stays a piece.

    ``ignore_merges``: a piece that is a token as it stands is that token, whatever the merges would make of it.
    ``add_bos``: whether a file of the family that does not say so puts BOS before a prompt.
    ``nfc``: the family's tokenizer composes characters first (Unicode NFC).
    """

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    add_bos: bool = False
    nfc: bool = False

    def splitter(self) -> tokenizers.pre_tokenizers.PreTokenizer:
        """The splitter as the `tokenizers` library runs it, ending in GPT-2's byte-level alphabet."""
        from tokenizers import Regex, pre_tokenizers

        steps = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in self.patterns]
        return pre_tokenizers.Sequence([*steps, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


_FAMILIES: dict[tuple[str, ...], PreTokenizer] = {
    ("gpt-2", "default"): PreTokenizer((_GPT2,)),
    ("smollm", "starcoder", "refact"): PreTokenizer((r"\p{N}", _GPT2)),
    ("llama-bpe", "llama3", "llama-v3"): PreTokenizer((_LLAMA3,), ignore_merges=True, add_bos=True),
    ("qwen2", "deepseek-r1-qwen"): PreTokenizer((_QWEN2,), nfc=True),
    ("tekken",): PreTokenizer((_TEKKEN,), ignore_merges=True, add_bos=True),
    ("deepseek-llm",): PreTokenizer(
        (
            r"[\r\n]",
            rf"\s?{_code_point_class(_CASED_LETTERS)}+",
            r"\s?[!-/:-~\x{FF01}-\x{FF0F}\x{FF1A}-\x{FF5E}\x{2018}-\x{201F}\x{3000}-\x{3002}]+",
            r"\s+$",
            _CJK,
            r"\p{N}",
        )
    ),
    ("deepseek-coder",): PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK, r"\p{N}")),
}
PRE_TOKENIZERS = {name: family for names, family in _FAMILIES.items() for name in names}
FALLBACK = "gpt-2"


def pre_tokenizer(name: str | None) -> PreTokenizer:
    """The splitter a GGUF file names. An unknown or absent name gives GPT-2's and a warning: the answers of such a model may be worse."""
    known = PRE_TOKENIZERS.get(name or "")
    if known is None:
        log.warning(
            "tokenizer.ggml.pre: %s is not known; splitting text as %r does, which may tokenize wrongly and degrade the answers. Known: %s",
            "(absent)" if name is None else repr(name),
            FALLBACK,
            ", ".join(sorted(PRE_TOKENIZERS)),
        )
        return PRE_TOKENIZERS[FALLBACK]
    return known
