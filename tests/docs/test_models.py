"""docs/models.md lists what the code knows: families, tensor types, tokenizers, the catalogue, the files of a hub repository, limits."""

from __future__ import annotations

import re

from octavo.models import template_limits
from octavo.models.catalog import CATALOG
from octavo.models.families import known_gguf_architectures, known_hf_model_types
from octavo.models.gguf import GGML_TYPES
from octavo.models.hub import _FOLDER_FILES, _PREFERRED
from octavo.models.model_file import BLOCK_SIZES
from octavo.models.pretokenizers import FALLBACK, PRE_TOKENIZERS
from octavo.models.safetensors import DTYPES
from octavo.models.tokenizer_gguf import KNOWN_MODELS
from tests.docs.pages import page, rows_by_name, section, tables

PAGE = page("docs/models.md")


def spans(text: str) -> list[str]:
    return re.findall(r"`([^`]*)`", text)


def test_families() -> None:
    (table,) = tables(section(PAGE, "Families"))
    assert {name for row in table for name in spans(row[1])} == set(known_gguf_architectures())
    assert {name for row in table for name in spans(row[2])} == set(known_hf_model_types())


def test_tensor_types() -> None:
    (table,) = tables(section(PAGE, "GGUF"))
    assert {name.lower() for row in table for name in spans(row[1])} == BLOCK_SIZES.keys() & set(GGML_TYPES.values())
    listed = section(PAGE, "Safetensors").partition("Types: ")[2].partition(".")[0]
    assert listed.split(", ") == list(DTYPES)


def test_tokenizers() -> None:
    byte_level, _, rest = section(PAGE, "Tokenizers").partition("- **SentencePiece")
    names = spans(byte_level.partition("Text is split as")[2].partition("Any other name")[0])
    assert set(names[1:]) == set(PRE_TOKENIZERS) and names[0] == "tokenizer.ggml.pre"
    assert f"is split as `{FALLBACK}` does" in byte_level
    assert set(re.findall(r"`tokenizer.ggml.model` = `(\w+)`", PAGE)) == set(KNOWN_MODELS)


def test_catalogue() -> None:
    shown = rows_by_name(section(PAGE, "Catalogue and cache"))
    assert {name: row[1:] for name, row in shown.items()} == {
        entry.name: [entry.description, f"{entry.size_bytes / 1e6:.0f} MB"] for entry in CATALOG.values()
    }


def test_what_is_fetched_of_a_repository() -> None:
    listed = PAGE.partition("repository these are\nfetched: ")[2].partition(", and the weights")[0]
    assert tuple(spans(listed)) == _FOLDER_FILES
    assert f"the one with `{_PREFERRED}` in its name" in PAGE


def test_limits_of_templates() -> None:
    assert (template_limits.STEPS, template_limits.CPU_S, template_limits.VALUE_CHARS) == (1_000_000, 2.0, 1 << 20)
    assert "a million steps, 2 s of CPU, a MiB per value (plus four times the input)" in PAGE
