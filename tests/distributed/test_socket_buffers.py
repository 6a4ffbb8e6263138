"""The buffer that a sender of KV asks for never holds less than the kernel's own would grow to."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.distributed import tcp_transport
from octavo.distributed.tcp_transport import TcpTransport, buffer_to_ask_for
from octavo.distributed.transport import TransferError
from tests.distributed.test_transports import HEAD, SECRET

MIB = 1 << 20


@pytest.mark.parametrize(
    ("most_asked", "most_tuned", "asked"),
    [
        (212_992, 4 * MIB, None),  # Linux as it comes: what may be asked for is a tenth of what tuning reaches
        (4 * MIB, 4 * MIB, 4 * MIB),
        (64 * MIB, 4 * MIB, 4 * MIB),
        (64 * MIB, 64 * MIB, None),  # set up for long fast links
        (2 * MIB, 4 * MIB, 4 * MIB),
    ],
)
def test_common_hosts(most_asked: int, most_tuned: int, asked: int | None) -> None:
    assert buffer_to_ask_for(most_asked, most_tuned) == asked


@given(st.integers(1, 1 << 30), st.integers(1, 1 << 30))
def test_it_is_never_less_than_the_kernel_would_have_made_it(most_asked: int, most_tuned: int) -> None:
    asked = buffer_to_ask_for(most_asked, most_tuned)
    assert asked is None or 2 * min(asked, most_asked) >= most_tuned


@pytest.mark.parametrize("limits", [("4194304", "4096 16384 4194304"), ("212992", "4096 16384 4194304"), ("", ""), None])
def test_a_sender_asks_for_what_the_host_allows(
    limits: tuple[str, str] | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    class Socket(socket.socket):
        def setsockopt(self, level: int, name: int, value: int) -> None:  # type: ignore[override]
            if (level, name) == (socket.SOL_SOCKET, socket.SO_SNDBUF):
                asked.append(value)

    for name, text in zip(("_WMEM_MAX", "_TCP_WMEM"), limits or ("", ""), strict=True):
        file = tmp_path / name
        if limits is not None:
            file.write_text(text)
        monkeypatch.setattr(tcp_transport, name, file)
    monkeypatch.setattr(tcp_transport.socket, "socket", Socket)
    with socket.create_server(("127.0.0.1", 0)) as nobody:
        port = nobody.getsockname()[1]
    with pytest.raises(TransferError):
        TcpTransport(SECRET).connect(f"127.0.0.1:{port}", HEAD)
    assert asked == ([4 * MIB] if limits is not None and limits[0] == "4194304" else [])
