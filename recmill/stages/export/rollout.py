"""rollout: wait until every server answers with the version that is current, or go back to the one before it.

Servers themselves wait for a first version with `wait_for_version`.
"""

from __future__ import annotations

import http.client
import json
import socket
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from recmill.artifacts.bundle.bundle import set_current
from recmill.artifacts.bundle.remote import named_at, rollback_at
from recmill.errors import ArtifactError, RecmillError
from recmill.storage.objects import is_url

_SECONDS_FOR_ANSWER = 5.0


class RolloutError(RecmillError):
    """The servers did not switch to the new version."""


@dataclass(frozen=True)
class Server:
    """Servers behind one name, with any number of addresses."""

    url: str
    token: str | None = None
    ca: Path | None = None
    tls_name: str | None = None  # of the certificate; None: the host of the URL

    def versions(self) -> dict[str, str]:
        """Address -> the version that is served there, or what is wrong with it. OSError when the name has none."""
        parts = urlsplit(self.url)
        port = parts.port or (443 if parts.scheme == "https" else 80)
        found = socket.getaddrinfo(parts.hostname, port, type=socket.SOCK_STREAM)
        addresses = dict.fromkeys(str(entry[4][0]) for entry in found)
        return {address: self._version_at(address, port) for address in addresses}

    def _version_at(self, address: str, port: int) -> str:
        headers = {"authorization": f"Bearer {self.token}"} if self.token else {}
        try:
            connection = self._connection(address, port)
            try:
                connection.request("GET", "/v1/status", headers=headers)
                answer = connection.getresponse()
                body = answer.read()
            finally:
                connection.close()
            if answer.status != 200:
                return f"answers with {answer.status}"
            status = json.loads(body)
            return str(status["version"]) if status["ready"] else "not ready"
        except (OSError, http.client.HTTPException, ValueError, KeyError, TypeError) as error:
            return f"no answer: {error}"

    def _connection(self, address: str, port: int) -> http.client.HTTPConnection:
        parts = urlsplit(self.url)
        if parts.scheme == "http":
            return http.client.HTTPConnection(address, port, timeout=_SECONDS_FOR_ANSWER)
        name = self.tls_name or str(parts.hostname)
        return _NamedConnection(name, address, port, ssl.create_default_context(cafile=self.ca))


class _NamedConnection(http.client.HTTPSConnection):
    """To one address of a name; the certificate must be the name's."""

    def __init__(self, name: str, address: str, port: int, context: ssl.SSLContext) -> None:
        super().__init__(name, port, timeout=_SECONDS_FOR_ANSWER, context=context)
        self._address, self._tls = address, context

    def connect(self) -> None:
        plain = socket.create_connection((self._address, self.port), self.timeout)
        self.sock = self._tls.wrap_socket(plain, server_hostname=self.host)


def wait_for_version(
    address: str | Path, report: Callable[[str], None] = lambda line: None, every_seconds: float = 2.0
) -> str:
    """The version that is current in a folder or under a URL, as soon as one is."""
    version, _ = named_at(address)
    if version is None:
        report(f"{address}: no version yet")
    while version is None:
        time.sleep(every_seconds)
        version, _ = named_at(address)
    return version


def roll_out(
    address: str | Path,
    server: Server,
    timeout_seconds: float,
    report: Callable[[str], None] = lambda line: None,
    every_seconds: float = 1.0,
) -> str:
    """The version, once every server has it. When they do not in time, the version before it is current again."""
    version, _ = named_at(address)
    if version is None:
        raise ArtifactError(f"{address} holds no version to roll out. Run `recmill bundle publish` first.")
    ends_at = time.monotonic() + timeout_seconds
    seen: dict[str, str] | str = {}
    while True:
        found = _versions_at(server)
        if found != seen:
            report(_summary(found))
            seen = found
        if isinstance(found, dict) and found and set(found.values()) == {version}:
            return version
        if time.monotonic() >= ends_at:
            raise _rolled_back(address, version, server, timeout_seconds, found)
        time.sleep(every_seconds)


def _versions_at(server: Server) -> dict[str, str] | str:
    try:
        return server.versions()
    except OSError as error:
        return f"{urlsplit(server.url).hostname} has no address: {error}"


def _summary(found: dict[str, str] | str) -> str:
    if isinstance(found, str):
        return found
    return "   ".join(f"{address} {what}" for address, what in found.items())


def _rolled_back(
    address: str | Path, version: str, server: Server, timeout_seconds: float, found: dict[str, str] | str
) -> RolloutError:
    _, previous = named_at(address)
    if previous is None:
        then = "There is no version before it, so it stays current."
    else:
        try:
            _make_current(address, previous)
            then = f"{previous} is current again."
        except RecmillError as error:
            then = f"It stays current, because the one before it cannot be: {error}"
    return RolloutError(
        f"{server.url} did not serve {version} within {timeout_seconds:g} s ({_summary(found)}). {then} "
        "The server's log has the reason."
    )


def _make_current(address: str | Path, version: str) -> None:
    if is_url(address):
        rollback_at(str(address), version)
    else:
        set_current(Path(address), version)
