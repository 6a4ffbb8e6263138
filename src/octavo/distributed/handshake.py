"""Mutual authentication at the start of a connection: HMAC-SHA256 over fresh random numbers of both sides. Bytes in, bytes out; no I/O.

    listener ─ GREETING, nonce ────────────────────────▶ connector
    listener ◀─ GREETING, nonce, proof (connector) ───── connector
    listener ─ proof (listener) ───────────────────────▶ connector

A proof is HMAC(secret, purpose, side, nonce of the listener, nonce of the connector): it proves knowledge of the secret, for this
connection, this purpose and this side, so that none can be replayed, reflected, or used for another port. The connector proves first: a
listener tells nothing that depends on the secret to somebody who does not know it. Not one byte of a peer is parsed before its proof.
What follows is neither encrypted nor signed: networks between workers have to be trusted not to change or read it.
"""

from __future__ import annotations

import hmac
import os
import secrets
import stat

GREETING = b"octavo-1"
NONCE_BYTES = 32
PROOF_BYTES = 32
MIN_SECRET_CHARS = 16
SECRET_VARIABLE = "OCTAVO_CLUSTER_SECRET"

HELLO_BYTES = len(GREETING) + NONCE_BYTES  # what the listener sends first
ANSWER_BYTES = HELLO_BYTES + PROOF_BYTES  # what the connector sends


class AuthenticationError(ConnectionError):
    """The peer did not prove that it knows the secret, or is no peer at all."""


class SecretError(ValueError):
    """There is no usable secret; the message says where one was looked for."""


class ListenerHandshake:
    """The listener's side: send ``hello``, read ``ANSWER_BYTES``, send what ``prove`` makes of them."""

    def __init__(self, secret: bytes, purpose: bytes) -> None:
        self._secret, self._purpose = secret, purpose
        self._nonce = secrets.token_bytes(NONCE_BYTES)
        self.hello = GREETING + self._nonce

    def prove(self, answer: bytes) -> bytes:
        """Raises AuthenticationError: close the connection then, and say nothing."""
        other = _nonce_of(answer, ANSWER_BYTES)
        if not hmac.compare_digest(answer[HELLO_BYTES:], _proof(self._secret, self._purpose, b"connector", self._nonce, other)):
            raise AuthenticationError("a peer does not know the secret")
        return _proof(self._secret, self._purpose, b"listener", self._nonce, other)


class ConnectorHandshake:
    """The connector's side: read ``HELLO_BYTES``, send what ``answer`` makes of them, read ``PROOF_BYTES``, ``check`` them."""

    def __init__(self, secret: bytes, purpose: bytes) -> None:
        self._secret, self._purpose = secret, purpose
        self._nonce = secrets.token_bytes(NONCE_BYTES)
        self._other = b""
        self.has_answered = False

    def answer(self, hello: bytes) -> bytes:
        """Raises AuthenticationError."""
        self._other = _nonce_of(hello, HELLO_BYTES)
        self.has_answered = True
        return GREETING + self._nonce + _proof(self._secret, self._purpose, b"connector", self._other, self._nonce)

    def check(self, proof: bytes) -> None:
        """Raises AuthenticationError."""
        if not hmac.compare_digest(proof, _proof(self._secret, self._purpose, b"listener", self._other, self._nonce)):
            raise AuthenticationError("the listener does not know the secret")


def _nonce_of(data: bytes, size: int) -> bytes:
    if len(data) != size or not data.startswith(GREETING):
        raise AuthenticationError("the peer does not speak this version of Octavo's protocol")
    return data[len(GREETING) : HELLO_BYTES]


def _proof(secret: bytes, purpose: bytes, side: bytes, listener_nonce: bytes, connector_nonce: bytes) -> bytes:
    label = b"".join(len(part).to_bytes(2, "big") + part for part in (purpose, side))
    return hmac.digest(secret, label + listener_nonce + connector_nonce, "sha256")


def new_secret() -> str:
    """A random secret, as text."""
    return secrets.token_urlsafe(32)


def read_secret(path: str | None = None) -> bytes:
    """The cluster's secret: the content of the file ``path`` without the blanks around it, else $OCTAVO_CLUSTER_SECRET.

    Raises SecretError when there is none, when it is shorter than ``MIN_SECRET_CHARS`` characters, cannot be read, or is in a file that
    others have access to (``check_private``).
    """
    if path is not None:
        text, where = _read_private(path), f"cluster_secret_file: {path!r}"
    else:
        text, where = os.environ.get(SECRET_VARIABLE, "").strip(), SECRET_VARIABLE
        if not text:
            need = "a front end and its workers need a common secret, here or in a file (--cluster-secret-file)"
            raise SecretError(f"{SECRET_VARIABLE}: '' is not allowed; {need}")
    if len(text) < MIN_SECRET_CHARS:
        raise SecretError(f"{where} holds a secret of {len(text)} characters; at least {MIN_SECRET_CHARS} are needed")
    return text.encode()


def _read_private(path: str) -> str:
    try:
        with open(path, encoding="utf-8") as file:
            status = os.fstat(file.fileno())  # of what is read, whatever takes its name meanwhile
            check_private(path, status.st_mode, is_own=status.st_uid == os.geteuid())
            return file.read().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise SecretError(f"cluster_secret_file: {path!r} is not allowed; it cannot be read: {error}") from error


def check_private(path: str, mode: int, is_own: bool) -> None:
    """SecretError for a file that more people may read or write than need the secret: others, or the group of a file that is this user's
    ``own`` (as ssh holds it with keys). A file that somebody else gives to this user may be so by its group: there is no other way."""
    open_to = stat.S_IMODE(mode) & (0o077 if is_own else 0o007)
    if open_to:
        who = "others than its owner" if is_own else "others than its owner and group"
        limit = f"{who} have access to it (mode {stat.S_IMODE(mode):04o}); `chmod {0o600 if is_own else 0o640:o}` takes that away"
        raise SecretError(f"cluster_secret_file: {path!r} is not allowed; {limit}")
