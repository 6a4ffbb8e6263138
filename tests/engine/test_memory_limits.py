"""Pools of KV beside the machine's memory: more than all of it is refused, more than is available is said."""

from __future__ import annotations

import logging

import pytest

from octavo.backends import machine
from octavo.config import ConfigError
from octavo.engine.memory_limits import check_memory


def test_what_is_refused_and_what_is_said(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(machine, "physical_memory_bytes", lambda: 4 << 30)
    monkeypatch.setattr(machine, "available_memory_bytes", lambda: 1 << 30)
    caplog.set_level(logging.WARNING, "octavo.engine")
    check_memory("kv_cache_memory", 1 << 30, 1 << 30)
    assert not caplog.records
    check_memory("num_kv_blocks", 7, 4 << 30)
    (record,) = caplog.records
    expected = "num_kv_blocks: 7 asks for 4294967296 bytes (4.0 GiB) of memory, and 1073741824 bytes (1.0 GiB) are available now"
    assert record.getMessage() == expected
    with pytest.raises(ConfigError, match=r"^num_kv_blocks: 7 is not allowed; 4294967297 bytes \(4.0 GiB\) are more than the 4294967296 "):
        check_memory("num_kv_blocks", 7, (4 << 30) + 1)
