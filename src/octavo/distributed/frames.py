"""Messages on a stream of bytes: four bytes of length, big end first, then the message. No I/O."""

from __future__ import annotations

HEADER_BYTES = 4
MAX_FRAME_BYTES = 64 << 20  # the log-probabilities of a prompt of 128k tokens, twenty for each, take half of it


class FrameError(ConnectionError):
    """A frame is longer than may be; nothing that follows can be understood."""


def frame(body: bytes, limit_bytes: int = MAX_FRAME_BYTES) -> bytes:
    """Raises FrameError for a body longer than the limit."""
    if len(body) > limit_bytes:
        raise FrameError(f"a message of {len(body)} bytes is not allowed; at most {limit_bytes}")
    return len(body).to_bytes(HEADER_BYTES, "big") + body


class FrameReader:
    """Cuts what arrives, in whatever pieces, into bodies. Holds less than one frame beyond what it has given out."""

    def __init__(self, limit_bytes: int = MAX_FRAME_BYTES) -> None:
        self._limit_bytes = limit_bytes
        self._held = bytearray()
        self._num_needed = HEADER_BYTES  # bytes without which there is no next frame

    def feed(self, data: bytes | bytearray | memoryview) -> list[bytes]:
        """The bodies that ``data`` completes. Raises FrameError for a length above the limit, before any of that body is kept."""
        self._held += data
        if len(self._held) < self._num_needed:  # the usual case within a long frame
            return []
        bodies, start, held = [], 0, memoryview(self._held)
        try:
            while True:
                end = start + HEADER_BYTES
                if len(held) < end:
                    self._num_needed = HEADER_BYTES
                    break
                size = int.from_bytes(held[start:end], "big")
                if size > self._limit_bytes:
                    raise FrameError(f"a message of {size} bytes is not allowed; at most {self._limit_bytes}")
                if len(held) < end + size:
                    self._num_needed = HEADER_BYTES + size
                    break
                bodies.append(bytes(held[end : end + size]))
                start = end + size
        finally:
            held.release()
        del self._held[:start]
        return bodies
