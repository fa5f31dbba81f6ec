"""Addresses of object storage: a directory as file://, and a bucket of a real S3 server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from s3_server import ENVIRONMENT, Address, FaultyProxy, S3Server, faulty, running_s3


@pytest.fixture(scope="session")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with running_s3() as server:
        yield server


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Credentials as users give them, and a cache of one's own."""
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("RECMILL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(params=["file", pytest.param("s3", marks=pytest.mark.services)])
def address(request: pytest.FixtureRequest, tmp_path: Path) -> Address:
    if request.param == "file":
        return lambda name: f"file://{tmp_path}/store/{name}"
    server: S3Server = request.getfixturevalue("s3")
    return lambda name: server.url(f"{tmp_path.name}/{name}")


@pytest.fixture
def proxy(s3: S3Server) -> Iterator[FaultyProxy]:
    with faulty(s3) as proxy:
        yield proxy
