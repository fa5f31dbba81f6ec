"""Servers answer from their copy of the bundles in object storage, and follow what is published there."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ports import free_port
from s3_server import Address, S3Server, running_s3
from shop import Shop

import recmill
from recmill.artifacts.bundle.bundle import Bundle, current_of, publish_bundle
from recmill.artifacts.bundle.delta import Changes, TableChange, deltas_of, write_delta
from recmill.artifacts.bundle.remote import BundleCopy, bundles_written, deltas_written
from recmill.artifacts.checkpoint.checkpoint import Checkpoint
from recmill.errors import ArtifactError
from recmill.stages.evaluate.live import find_live
from recmill.stages.export.publish import publish_at
from recmill.stages.export.rollback import rollback
from recmill.stages.export.rollout import RolloutError, Server, roll_out, wait_for_version
from recmill.stages.serve.config import ServeConfig
from recmill.stages.serve.messages import Rank
from recmill.stages.serve.service import Service
from recmill.stages.serve.storage import first_copy
from recmill.storage.objects import ObjectStore


def publish(bundles: Path, url: str, keep: int | None = None) -> str:
    return publish_at(bundles, url, keep=keep, despite_gate=True).bundle.version


def another_version(bundles: Path, number: int = 1) -> Path:
    """A copy of the shop's version under a later name."""
    old = Bundle.open(bundles)
    path = bundles / f"{int(old.version[:10]) + number:010d}-aaaaaaaa"
    shutil.copytree(old.path, path)
    (path / "manifest.json").unlink()
    manifest = {name: old.manifest[name] for name in old.manifest if name not in ("kind", "format", "files")}
    publish_bundle(path, {**manifest, "version": path.name})
    return path


def publish_delta(url: str, number: int, shift: float = 1.0) -> None:
    """As a follower does: every row of the ranker's item table moves a little."""
    copy = BundleCopy(url, part="followed")
    copy.refresh()
    with deltas_written(copy, str(current_of(copy.folder))) as publisher:
        bundle = Bundle.open(copy.folder)
        rows = bundle.collection("deep").rows["item"]
        keys = np.arange(rows.num_rows)
        change = TableChange(keys, rows.lookup(keys) + np.float32(shift), np.empty(0, np.int64))
        digest = bundle.manifest["recipe_digest"]
        changes = Changes({"deep/item": change})
        write_delta(copy.folder, bundle.version, number, digest, changes, {"log_end": 5.0})
        publisher.publish(number)


@pytest.fixture
def url(address: Address, shop: Shop) -> str:
    """Where the shop's bundle is published."""
    publish(shop.bundles, address("bundle"))
    return address("bundle")


@pytest.fixture
def service(url: str) -> Iterator[Service]:
    service = Service(ServeConfig(bundle=first_copy(url), bundle_url=url), watch_seconds=60)
    yield service
    service.close()


def follow(service: Service) -> None:
    """What the server's threads do every second."""
    assert service.versions.storage is not None
    service.versions.storage.refresh()
    service.versions.poll()


def scores(service: Service) -> list[float]:
    return service.rank(Rank(user="u1", items=["i1", "i2", "i3"])).scores


def test_a_published_bundle_answers_as_the_local_one(url: str, shop: Shop) -> None:
    expected = recmill.open_bundle(shop.bundles).recommend("u1", k=5)
    assert recmill.open_bundle(url).recommend("u1", k=5).items == expected.items
    version = current_of(shop.bundles)
    assert Bundle.open(ObjectStore(url).address(str(version))).version == version


def test_a_server_takes_new_versions_and_goes_back(service: Service, url: str, own_bundles: Path) -> None:
    old = service.current.version
    new = publish(another_version(own_bundles), url)
    follow(service)
    assert service.current.version == new
    assert rollback(url) == (old, new)
    follow(service)
    assert service.current.version == old


def test_a_server_takes_deltas_in_order(service: Service, url: str) -> None:
    before = scores(service)
    publish_delta(url, 1)
    follow(service)
    after = scores(service)
    assert service.current.num_deltas == 1
    assert after != before
    publish_delta(url, 2, shift=2.0)
    follow(service)
    assert service.current.num_deltas == 2
    assert scores(service) != after


def test_a_delta_without_an_index_is_not_there(service: Service, url: str) -> None:
    ObjectStore(url).write(f"{service.current.version}.deltas/000001/manifest.json", b"{}")
    follow(service)
    assert service.current.num_deltas == 0


def test_a_delta_that_another_trainer_published_is_refused(url: str, shop: Shop) -> None:
    publish_delta(url, 1)
    with pytest.raises(ArtifactError, match=r"Delta .*000001.* exists already"):
        publish_delta_again(url)


def publish_delta_again(url: str) -> None:
    """Another delta of the same number, by a follower that does not know of the first."""
    copy = BundleCopy(url, part="elsewhere")
    with deltas_written(copy, str(current_of(BundleCopy(url, part="followed").folder))) as publisher:
        bundle = Bundle.open(copy.folder)
        shutil.rmtree(deltas_of(copy.folder, bundle.version)[0])
        write_delta(copy.folder, bundle.version, 1, bundle.manifest["recipe_digest"], Changes(), {})
        publisher.publish(1)


def test_a_version_that_a_request_names_is_copied_then(service: Service, url: str, own_bundles: Path) -> None:
    first = service.current.version
    for number in (1, 2):
        publish(another_version(own_bundles, number), url)
    fresh = Service(ServeConfig(bundle=first_copy(url), bundle_url=url), watch_seconds=60)
    try:
        assert fresh.rank(Rank(user="u1", items=["i1"], version=first)).version == first
    finally:
        fresh.close()


def test_old_versions_are_removed_with_their_deltas(url: str, own_bundles: Path) -> None:
    publish_delta(url, 1)
    versions = [publish(another_version(own_bundles, number), url, keep=1) for number in (2, 1)]
    names = {found.name.split("/")[0].removesuffix(".deltas") for found in ObjectStore(url).list("")}
    assert names - {"index.json"} == {*versions, *(name for name in names if name.startswith("current."))}


def test_a_rollback_on_a_server_names_the_command(service: Service, url: str) -> None:
    with pytest.raises(ArtifactError, match="recmill rollback --bundle"):
        service.rollback()


def test_what_is_not_a_folder_of_bundles_is_refused(address: Address) -> None:
    with pytest.raises(ArtifactError, match="holds no bundles"):
        first_copy(address("nothing"))


def test_a_killed_export_leaves_what_was_current(url: str, own_bundles: Path) -> None:
    with bundles_written(url) as bundles:
        path = another_version(own_bundles)
        shutil.copytree(path, bundles.path / path.name)
        bundles.upload_folder(path.name)  # and killed before the index
    assert Bundle.open(url).version != path.name


# A server of its own, and a storage that goes away


def ask(http: str, path: str, body: object = None) -> dict[str, Any]:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"{http}{path}", data, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=10) as answer:
        return dict(json.loads(answer.read()))


def is_lost(http: str) -> bool:
    """Whether the server reports that it cannot reach its storage."""
    return "storage" in ask(http, "/v1/status").get("refused", {})


def until(happened: Callable[[], bool], what: str, seconds: float = 60) -> None:
    ends_at = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < ends_at, what
        time.sleep(0.1)


@pytest.fixture
def own_s3() -> Iterator[S3Server]:
    with running_s3() as server:
        yield server


@pytest.mark.services
def test_a_server_that_lost_its_storage_keeps_serving_and_catches_up(
    own_s3: S3Server, shop: Shop, own_bundles: Path
) -> None:
    url = own_s3.url("bundle")
    publish(shop.bundles, url)
    command = [
        sys.executable,
        "-m",
        "recmill",
        "serve",
        "--bundle",
        url,
        "--http-port",
        "0",
        "--grpc-port",
        "0",
        "--json",
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as server:
        try:
            assert server.stdout is not None
            http = json.loads(server.stdout.readline())["http"]
            own_s3.freeze()
            until(lambda: is_lost(http), "the loss is not reported")
            for _ in range(5):
                assert ask(http, "/v1/recommend", {"user": "u1", "k": 3})["items"]
            own_s3.thaw()
            new = publish(another_version(own_bundles), url)
            until(lambda: ask(http, "/v1/status")["version"] == new, "the new version is not served")
            until(lambda: not is_lost(http), "the loss is still reported")
            own_s3.kill()
            assert ask(http, "/v1/recommend", {"user": "u1", "k": 3})["items"]
        finally:
            os.kill(server.pid, signal.SIGTERM)
            assert server.wait(60) == 0
    # Started again without the storage, it serves what was copied before.
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as server:
        try:
            assert server.stdout is not None
            assert json.loads(server.stdout.readline())["version"] == new
        finally:
            os.kill(server.pid, signal.SIGTERM)
            assert server.wait(60) == 0


def test_a_first_version_is_waited_for_and_one_that_no_server_takes_is_rolled_back(
    address: Address, own_bundles: Path
) -> None:
    url = address("waited")
    first = ""

    def publish_when_told(line: str) -> None:
        nonlocal first
        first = publish(own_bundles, url)

    assert wait_for_version(url, publish_when_told, every_seconds=0.01) == first
    second = publish(another_version(own_bundles), url)
    nobody = Server(f"http://127.0.0.1:{free_port()}")
    with pytest.raises(RolloutError, match=f"did not serve {second} .* {first} is current again"):
        roll_out(url, nobody, 0.01, every_seconds=0.01)
    assert wait_for_version(url) == first


def test_the_gate_measures_the_model_that_is_live_under_a_url(address: Address, shop: Shop) -> None:
    url = address("live")
    assert find_live(url, "best", allow_none=True) is None
    with pytest.raises(ArtifactError, match="holds no live model"):
        find_live(url, "best", allow_none=False)
    publish_at(shop.bundles, url, shop.checkpoint, despite_gate=True)
    live = find_live(url, "best", allow_none=False)
    assert live is not None
    assert live.steps == Bundle.open(shop.bundles).manifest["checkpoint"]["steps"]
    assert live.folder.models == Checkpoint.open(shop.checkpoint).models
