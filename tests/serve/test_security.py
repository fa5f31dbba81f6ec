"""Who may connect and who may ask; what is said never holds a secret."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from certificates import write_certificates

from recmill.errors import Forbidden, Unauthenticated
from recmill.stages.serve.config import ServeConfig
from recmill.stages.serve.security import SecurityError, Tls, Tokens, check_address
from recmill.stages.serve.server import admin_is_open

READ, ADMIN = "read-token-0123456789", "admin-token-0123456789"


def tokens_of(folder: Path, text: str) -> Tokens:
    (folder / "tokens").write_text(text)
    return Tokens.read(folder / "tokens")


@pytest.mark.parametrize(
    "text",
    [
        f"# who asks\n{READ} read\n\n{ADMIN} admin  # who changes\n",
        json.dumps({READ: ["read"], ADMIN: ["read", "admin"]}),
        json.dumps({READ: "read", ADMIN: "admin"}),
    ],
)
def test_a_token_is_good_for_its_scopes(tmp_path: Path, text: str) -> None:
    tokens = tokens_of(tmp_path, text)
    tokens.check(f"Bearer {READ}", "read")
    tokens.check(f"bearer {ADMIN}", "read")
    tokens.check(f"Bearer {ADMIN}", "admin")
    with pytest.raises(Forbidden, match="no admin scope"):
        tokens.check(f"Bearer {READ}", "admin")


@pytest.mark.parametrize("header", [None, "", "Bearer", "Bearer ", f"Basic {READ}", READ, f"Bearer {READ}x"])
def test_without_a_known_token_nobody_asks(tmp_path: Path, header: str | None) -> None:
    with pytest.raises(Unauthenticated):
        tokens_of(tmp_path, f"{READ} read").check(header, "read")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "holds no token"),
        ("secret-secret-secret", "tokens:1: expected `token scope"),
        ("secret-secret-secret root", "scopes must be some of read, admin"),
        ("short read", "at least 16 characters"),
        ("{secret", "begins like JSON"),
        ('{"secret-secret-secret": 3}', "scopes must be"),
    ],
)
def test_a_wrong_token_file_is_named_and_its_tokens_are_not(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(SecurityError, match=words) as error:
        tokens_of(tmp_path, text)
    assert "secret" not in str(error.value)


def test_a_token_file_that_is_not_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(SecurityError, match="cannot be read: FileNotFoundError"):
        Tokens.read(tmp_path / "none")


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "::1", "localhost"])
def test_this_machine_alone_needs_no_protection(host: str) -> None:
    check_address(host, has_tls=False, has_tokens=False, insecure=False)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.1.2.3", "example.org"])
def test_other_machines_need_tls_or_tokens_or_a_word(host: str) -> None:
    with pytest.raises(SecurityError, match="--insecure if anyone may use"):
        check_address(host, has_tls=False, has_tokens=False, insecure=False)
    check_address(host, has_tls=True, has_tokens=False, insecure=False)
    check_address(host, has_tls=False, has_tokens=True, insecure=False)
    check_address(host, has_tls=False, has_tokens=False, insecure=True)


def test_admin_needs_a_token_or_a_certificate_unless_only_this_machine_connects(tmp_path: Path) -> None:
    one_way = {"tls_cert": tmp_path, "tls_key": tmp_path}
    assert admin_is_open(ServeConfig(bundle=tmp_path, host="127.0.0.1"))
    assert admin_is_open(ServeConfig(bundle=tmp_path, host="0.0.0.0", **one_way, tls_client_ca=tmp_path))
    assert not admin_is_open(ServeConfig(bundle=tmp_path, host="0.0.0.0", **one_way))
    assert not admin_is_open(ServeConfig(bundle=tmp_path, host="0.0.0.0", insecure=True))


def test_certificates_are_checked_before_the_server_starts(tmp_path: Path) -> None:
    write_certificates(tmp_path)
    server, key, client_key = (tmp_path / name for name in ("server.pem", "server.key", "client.key"))
    Tls(server, key, tmp_path / "ca.pem").check()
    with pytest.raises(SecurityError, match=r"none\.pem does not exist"):
        Tls(tmp_path / "none.pem", key).check()
    with pytest.raises(SecurityError, match="KEY_VALUES_MISMATCH"):
        Tls(server, client_key).check()
    with pytest.raises(SecurityError, match="cannot be used"):
        Tls(key, key).check()
