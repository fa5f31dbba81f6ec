"""A bundle that waited elsewhere is published whole, with its checkpoint, and only if its gate passed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from ports import free_port
from shop import Shop

from recmill.artifacts.bundle.bundle import Bundle, current_of, kept_checkpoint, set_current, versions_of
from recmill.artifacts.checkpoint.checkpoint import Checkpoint
from recmill.artifacts.manifest import is_published
from recmill.errors import ArtifactError
from recmill.stages.evaluate.live import find_live
from recmill.stages.export.publish import publish
from recmill.stages.export.rollout import RolloutError, Server, roll_out, wait_for_version


def test_a_bundle_without_a_verdict_is_refused(shop: Shop, tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="never went through a gate"):
        publish(shop.bundles, tmp_path / "live")
    assert not (tmp_path / "live").exists()


def test_what_is_published_is_current_and_keeps_its_checkpoint(shop: Shop, tmp_path: Path) -> None:
    into = tmp_path / "live"
    found = publish(shop.bundles, into, shop.checkpoint, despite_gate=True)
    assert found.previous is None
    assert current_of(into) == found.bundle.version
    assert versions_of(into) == [found.bundle.version]
    found.bundle.verify()
    live = find_live(into, "best", allow_none=False)
    assert live is not None
    assert live.folder.path == kept_checkpoint(into, found.bundle.version)
    assert live.steps == found.bundle.manifest["checkpoint"]["steps"]
    assert live.folder.models == Checkpoint.open(shop.checkpoint).models
    # A second time changes nothing.
    assert (
        publish(shop.bundles, into, shop.checkpoint, despite_gate=True).bundle.version == found.bundle.version
    )


def test_an_interrupted_copy_is_not_a_version(shop: Shop, tmp_path: Path) -> None:
    into, version = tmp_path / "live", Bundle.open(shop.bundles).version
    for left in (into / f"{version}.partial", into / "checkpoints" / f"{version}.partial"):
        left.mkdir(parents=True)
        (left / "manifest.json").write_text("{}")
    assert publish(shop.bundles, into, shop.checkpoint, despite_gate=True).bundle.version == version
    assert is_published(kept_checkpoint(into, version))


def test_a_damaged_bundle_is_not_published(own_bundles: Path, tmp_path: Path) -> None:
    bundle = Bundle.open(own_bundles)
    file = bundle.path / max(bundle.manifest["files"])
    size = file.stat().st_size
    file.write_bytes(os.urandom(size))
    with pytest.raises(ArtifactError, match="checksums of its record"):
        publish(own_bundles, tmp_path / "live", despite_gate=True)
    assert current_of(tmp_path / "live") is None


def test_a_checkpoint_of_another_bundle_is_refused(shop: Shop, own_bundles: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    made_of = Checkpoint.open(shop.checkpoint)
    Checkpoint.create(other, made_of.recipe, made_of.columns, made_of.plan, "elsewhere")
    with pytest.raises(ArtifactError, match="Give the checkpoint that it was exported from"):
        publish(own_bundles, tmp_path / "live", other, despite_gate=True)


def test_nothing_live_is_an_error_unless_it_is_allowed(tmp_path: Path) -> None:
    assert find_live(tmp_path / "bundle", "best", allow_none=True) is None
    with pytest.raises(ArtifactError, match="add --allow-no-live for the first model"):
        find_live(tmp_path / "bundle", "best", allow_none=False)


def test_waiting_ends_when_a_first_version_is_published(shop: Shop, tmp_path: Path) -> None:
    into, said = tmp_path / "live", []

    def publish_when_told(line: str) -> None:
        said.append(line)
        publish(shop.bundles, into, despite_gate=True)

    version = wait_for_version(into, publish_when_told, every_seconds=0.01)
    assert (version, said) == (current_of(into), [f"{into}: no version yet"])
    assert wait_for_version(into, said.append) == version
    assert len(said) == 1  # nothing to wait for


def test_a_command_that_waits_ends_when_it_is_told(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "recmill", "bundle", "wait", str(tmp_path / "live")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == f"wait   {tmp_path}/live: no version yet\n"
    process.terminate()
    assert process.wait(20) == 130
    process.stdout.close()


def nobody() -> Server:
    """A port that nothing listens at."""
    return Server(f"http://127.0.0.1:{free_port()}")


def test_a_version_that_no_server_takes_is_rolled_back(own_bundles: Path) -> None:
    before = current_of(own_bundles)
    assert before is not None
    newer = own_bundles / "0000000999-newer"
    shutil.copytree(own_bundles / before, newer)
    set_current(own_bundles, newer.name)
    said: list[str] = []
    with pytest.raises(RolloutError, match=f"{before} is current again"):
        roll_out(own_bundles, nobody(), 0.1, said.append, every_seconds=0.05)
    assert current_of(own_bundles) == before
    assert len(said) == 1
    assert "Connection refused" in said[0]


def test_the_first_version_stays_though_nobody_serves_it(own_bundles: Path) -> None:
    version = current_of(own_bundles)
    with pytest.raises(RolloutError, match="There is no version before it, so it stays current"):
        roll_out(own_bundles, nobody(), 0.01, every_seconds=0.01)
    assert current_of(own_bundles) == version


def test_a_server_name_without_an_address_is_told(own_bundles: Path) -> None:
    with pytest.raises(RolloutError, match="has no address"):
        roll_out(own_bundles, Server("http://nobody.invalid:80"), 0.01, every_seconds=0.01)
