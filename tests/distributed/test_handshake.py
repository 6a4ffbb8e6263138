"""The handshake: both sides prove the secret, nothing can be replayed, reflected or used for another port; secrets are read or refused."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from octavo.distributed import handshake
from octavo.distributed.handshake import (
    ANSWER_BYTES,
    HELLO_BYTES,
    PROOF_BYTES,
    SECRET_VARIABLE,
    AuthenticationError,
    ConnectorHandshake,
    ListenerHandshake,
    SecretError,
)

SECRET = b"a secret of the tests"


def test_two_sides_that_know_the_secret_agree() -> None:
    listener, connector = ListenerHandshake(SECRET, b"control"), ConnectorHandshake(SECRET, b"control")
    answer = connector.answer(listener.hello)
    proof = listener.prove(answer)
    connector.check(proof)
    assert (len(listener.hello), len(answer), len(proof)) == (HELLO_BYTES, ANSWER_BYTES, PROOF_BYTES)


def test_a_listener_says_nothing_of_the_secret_to_who_does_not_know_it() -> None:
    listener, stranger = ListenerHandshake(SECRET, b"control"), ConnectorHandshake(b"a guess at the secret", b"control")
    with pytest.raises(AuthenticationError, match="secret"):
        listener.prove(stranger.answer(listener.hello))


def test_a_listener_that_does_not_know_the_secret_is_found_out() -> None:
    liar, connector = ListenerHandshake(b"a guess at the secret", b"control"), ConnectorHandshake(SECRET, b"control")
    connector.answer(liar.hello)
    with pytest.raises(AuthenticationError, match="listener"):
        connector.check(bytes(PROOF_BYTES))


def test_a_proof_for_one_purpose_is_none_for_another() -> None:
    listener, connector = ListenerHandshake(SECRET, b"kv"), ConnectorHandshake(SECRET, b"control")
    with pytest.raises(AuthenticationError):
        listener.prove(connector.answer(listener.hello))


def test_an_answer_cannot_be_replayed() -> None:
    listener, connector = ListenerHandshake(SECRET, b"control"), ConnectorHandshake(SECRET, b"control")
    answer = connector.answer(listener.hello)
    listener.prove(answer)
    with pytest.raises(AuthenticationError):
        ListenerHandshake(SECRET, b"control").prove(answer)


def test_a_connectors_proof_cannot_be_reflected() -> None:
    connector = ConnectorHandshake(SECRET, b"control")
    answer = connector.answer(ListenerHandshake(SECRET, b"control").hello)
    with pytest.raises(AuthenticationError):
        connector.check(answer[HELLO_BYTES:])


@pytest.mark.parametrize("data", [b"", b"GET / HTTP/1.1\r\n", bytes(ANSWER_BYTES), b"octavo-1"])
def test_what_is_no_handshake_is_refused(data: bytes) -> None:
    with pytest.raises(AuthenticationError, match="version"):
        ListenerHandshake(SECRET, b"control").prove(data)
    with pytest.raises(AuthenticationError, match="version"):
        ConnectorHandshake(SECRET, b"control").answer(data)


def test_secrets_come_from_the_file_or_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "secret"
    file.touch(0o600)
    file.write_text(f"  {'f' * 16}\n")
    monkeypatch.setenv(SECRET_VARIABLE, "e" * 16)
    assert handshake.read_secret(str(file)) == b"f" * 16
    assert handshake.read_secret() == b"e" * 16


def test_a_secret_that_is_missing_or_too_short_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SECRET_VARIABLE, raising=False)
    with pytest.raises(SecretError, match=SECRET_VARIABLE):
        handshake.read_secret()
    monkeypatch.setenv(SECRET_VARIABLE, "x" * 15)
    with pytest.raises(SecretError, match="15 characters; at least 16"):
        handshake.read_secret()
    with pytest.raises(SecretError, match="cluster_secret_file"):
        handshake.read_secret(str(tmp_path / "none"))


@pytest.mark.parametrize("mode", [0o400, 0o600, 0o700])
def test_a_file_of_its_owners_alone_is_taken(tmp_path: Path, mode: int) -> None:
    file = tmp_path / "secret"
    file.write_text("f" * 16)
    file.chmod(mode)
    assert handshake.read_secret(str(file)) == b"f" * 16


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o620, 0o602, 0o604, 0o610])
def test_a_file_that_others_have_access_to_is_refused_by_its_name_and_mode(tmp_path: Path, mode: int) -> None:
    file, link = tmp_path / "secret", tmp_path / "link"
    file.write_text("f" * 16)
    file.chmod(mode)
    link.symlink_to(file)
    for path in (file, link):
        message = f"cluster_secret_file: {str(path)!r} is not allowed; others than its owner have access to it (mode {mode:04o})"
        with pytest.raises(SecretError, match=re.escape(message)):
            handshake.read_secret(str(path))


def test_a_file_that_somebody_else_owns_may_be_given_by_its_group() -> None:
    handshake.check_private("s", 0o100440, is_own=False)
    with pytest.raises(SecretError, match="owner and group have access to it .mode 0444.; `chmod 640`"):
        handshake.check_private("s", 0o100444, is_own=False)


def test_new_secrets_are_long_enough_and_differ() -> None:
    first, second = handshake.new_secret(), handshake.new_secret()
    assert first != second and len(first) >= 32
