"""Who may connect and make calls: addresses, TLS, bearer tokens. Messages never contain a secret."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import json
import ssl
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import grpc

from recmill.errors import Forbidden, RecmillError, Unauthenticated

Scope = Literal["read", "admin"]
SCOPES: tuple[Scope, ...] = ("read", "admin")
_SHORTEST = 16  # minimal length of a token


class SecurityError(RecmillError):
    """The server refuses to start with these settings."""

    exit_code = 2


class Tokens:
    """Scopes by token; `admin` includes `read`. Only digests of tokens are stored."""

    def __init__(self, scopes: dict[bytes, frozenset[Scope]]) -> None:
        self._scopes = scopes  # keys are digests

    @classmethod
    def read(cls, path: Path) -> Tokens:
        """Read tokens from a file.

        JSON {token: [scope, ...]}, or lines of `token scope[,scope]`; # begins a comment.
        """
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise SecurityError(f"--token-file {path} cannot be read: {type(error).__name__}.") from None
        entries = _json_tokens(path, text) if text.lstrip().startswith("{") else _line_tokens(path, text)
        tokens = {_digest(token): _scopes(where, token, scopes) for where, token, scopes in entries}
        if not tokens:
            raise SecurityError(f"--token-file {path} holds no token. Write lines such as: TOKEN read")
        return cls(tokens)

    def check(self, authorization: str | None, scope: Scope) -> None:
        """Raise Unauthenticated or Forbidden unless the header's token has this scope."""
        kind, _, token = (authorization or "").partition(" ")
        if kind.lower() != "bearer" or not token.strip():
            raise Unauthenticated(
                "This server requires a token: send the header Authorization: Bearer TOKEN."
            )
        allowed = self._find(_digest(token.strip()))
        if allowed is None:
            raise Unauthenticated("The token is unknown.")
        if scope not in allowed:
            raise Forbidden(f"The token has no {scope} scope, which this call needs.")

    def _find(self, wanted: bytes) -> frozenset[Scope] | None:
        # Every token is compared, so that timing reveals nothing.
        granted = None
        for digest, scopes in self._scopes.items():
            if hmac.compare_digest(digest, wanted):
                granted = scopes
        return granted


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).digest()


def _line_tokens(path: Path, text: str) -> Iterable[tuple[str, str, list[str]]]:
    for number, line in enumerate(text.splitlines(), 1):
        parts = line.partition("#")[0].split()
        if parts and len(parts) != 2:
            raise SecurityError(f"{path}:{number}: expected `token scope[,scope]`, found {len(parts)} words.")
        if parts:
            yield f"{path}:{number}", parts[0], parts[1].split(",")


def _json_tokens(path: Path, text: str) -> Iterable[tuple[str, str, list[str]]]:
    try:
        tokens: dict[str, Any] = json.loads(text)
    except ValueError:
        raise SecurityError(
            f"{path} begins like JSON but is not valid JSON. Expected: {{token: [scope]}}."
        ) from None
    for number, (token, scopes) in enumerate(tokens.items(), 1):
        yield f"{path}: token {number}", token, [scopes] if isinstance(scopes, str) else scopes


def _scopes(where: str, token: str, names: list[str]) -> frozenset[Scope]:
    if len(token) < _SHORTEST:
        raise SecurityError(f"{where}: a token must have at least {_SHORTEST} characters.")
    if not isinstance(names, list) or not names or not set(names) <= set(SCOPES):
        raise SecurityError(f"{where}: scopes must be some of {', '.join(SCOPES)}.")
    return frozenset(SCOPES) if "admin" in names else frozenset({"read"})


@dataclass(frozen=True)
class Tls:
    """This server's certificate and key, and the CA of client certificates, if they are required."""

    certificate: Path
    key: Path
    client_ca: Path | None = None

    def check(self) -> None:
        """Raise when files are missing, or the key does not belong to the certificate."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            context.load_cert_chain(self.certificate, self.key, password=_no_password)
            if self.client_ca:
                context.load_verify_locations(self.client_ca)
        except FileNotFoundError:
            missing = [str(path) for path in self._files() if not path.exists()]
            raise SecurityError(f"TLS: {', '.join(missing)} does not exist.") from None
        except (ssl.SSLError, OSError, ValueError) as error:
            reason = getattr(error, "reason", None) or type(error).__name__
            files = ", ".join(map(str, self._files()))
            raise SecurityError(
                f"TLS: {files} cannot be used ({reason}). Expected PEM files, a key without a password."
            ) from None

    def for_grpc(self) -> grpc.ServerCredentials:
        pair = (self.key.read_bytes(), self.certificate.read_bytes())
        ca = self.client_ca.read_bytes() if self.client_ca else None
        return grpc.ssl_server_credentials([pair], ca, require_client_auth=ca is not None)

    def for_uvicorn(self) -> dict[str, Any]:
        settings = {"ssl_certfile": str(self.certificate), "ssl_keyfile": str(self.key)}
        if self.client_ca is None:
            return settings
        return {**settings, "ssl_ca_certs": str(self.client_ca), "ssl_cert_reqs": ssl.CERT_REQUIRED}

    def _files(self) -> list[Path]:
        return [path for path in (self.certificate, self.key, self.client_ca) if path]


def _no_password() -> str:
    raise ValueError("the key has a password")


def check_address(host: str, has_tls: bool, has_tokens: bool, insecure: bool) -> None:
    """Raise unless the address is local, or clients are authenticated or explicitly unrestricted."""
    if not (is_loopback(host) or has_tls or has_tokens or insecure):
        raise SecurityError(
            f"--host {host} can be reached from other machines, and there is neither TLS nor a token. "
            "Add --tls-cert and --tls-key, or --token-file; or --insecure if anyone may use this server."
        )


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
