"""Versions and deltas come and go while a service answers; what is damaged, older or foreign is refused."""

from __future__ import annotations

import json
import shutil
import threading
from pathlib import Path

import numpy as np
import pytest
from shop import Shop

from recmill.bundle import Bundle, current_of, publish_bundle, set_current, versions_of
from recmill.bundle.delta import Changes, TableChange, deltas_folder, write_delta
from recmill.errors import ArtifactError, NotFound
from recmill.serve.changes import Change, Journal
from recmill.serve.messages import NewItem, Rank, Recommend
from recmill.serve.service import Options, Service, share_of


@pytest.fixture
def service(own_bundles: Path) -> Service:
    service = Service(own_bundles, Options(watch_seconds=60))
    service.warm_up()
    return service


def look(service: Service) -> None:
    assert service._watcher is not None
    service._watcher.look()


def another_version(own_bundles: Path, suffix: str = "aaaaaaaa", **fields: object) -> str:
    """A copy of the current version under a later name."""
    old = Bundle.open(own_bundles)
    version = f"{int(old.version[:10]) + 1:010d}-{suffix}"
    shutil.copytree(old.path, own_bundles / version)
    (own_bundles / version / "manifest.json").unlink()
    manifest = {
        name: value for name, value in old.manifest.items() if name not in ("kind", "format", "files")
    }
    publish_bundle(own_bundles / version, {**manifest, "version": version, **fields})
    return version


def a_delta(own_bundles: Path, number: int, shift: float = 1.0, digest: str | None = None) -> Path:
    """Every row of the ranker's item table moved a little."""
    bundle = Bundle.open(own_bundles)
    rows = bundle.collection("deep").rows["item"]
    keys = np.arange(rows.num_rows)
    change = TableChange(keys, rows.lookup(keys) + np.float32(shift), np.empty(0, np.int64))
    digest = digest or bundle.manifest["recipe_digest"]
    return write_delta(
        own_bundles, bundle.version, number, digest, Changes({"deep/item": change}), {"log_end": 5.0}
    )


def scores(service: Service) -> list[float]:
    return service.rank(Rank(user="u1", items=["i1", "i2", "i3"])).scores


# versions


def test_a_new_version_is_served_once_it_is_current(service: Service, own_bundles: Path) -> None:
    old = service.current.version
    new = another_version(own_bundles)
    look(service)
    assert service.current.version == old
    set_current(own_bundles, new)
    look(service)
    assert service.recommend(Recommend(user="u1")).version == new
    assert service.status().previous == old


def test_rollback_serves_the_version_before_here_and_for_others(service: Service, own_bundles: Path) -> None:
    old = service.current.version
    set_current(own_bundles, another_version(own_bundles))
    look(service)
    status = service.rollback()
    assert status.version == old == current_of(own_bundles) == service.current.version
    look(service)
    assert service.current.version == old


def test_rollback_without_an_earlier_version_says_so(service: Service) -> None:
    with pytest.raises(NotFound, match="no version before"):
        service.rollback()
    with pytest.raises(NotFound, match="there are"):
        service.rollback("0000000000-ffffffff")
    with pytest.raises(NotFound):
        service.rollback("../../etc")


def test_a_damaged_version_is_refused_and_the_old_one_keeps_serving(
    service: Service, own_bundles: Path
) -> None:
    old, before = service.current.version, scores(service)
    new = another_version(own_bundles)
    file = next((own_bundles / new / "tables" / "deep").rglob("rows.npy"))
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    set_current(own_bundles, new)
    look(service)
    assert service.current.version == old
    assert scores(service) == before


def test_a_version_of_another_recipe_is_refused(service: Service, own_bundles: Path) -> None:
    old = service.current.version
    set_current(own_bundles, another_version(own_bundles, recipe_digest="something else"))
    look(service)
    assert service.current.version == old


def test_a_named_version_answers_beside_the_current_one(service: Service, own_bundles: Path) -> None:
    new = another_version(own_bundles)
    assert service.recommend(Recommend(user="u1", version=new)).version == new
    assert service.recommend(Recommend(user="u1")).version != new
    with pytest.raises(NotFound, match="there are"):
        service.recommend(Recommend(user="u1", version="../etc"))


def test_swapping_again_and_again_under_load_fails_nobody(service: Service, own_bundles: Path) -> None:
    versions = [service.current.version, another_version(own_bundles)]
    expected = scores(service)
    problems: list[object] = []
    done = threading.Event()

    def ask() -> None:
        while not done.is_set():
            try:
                if scores(service) != expected:
                    problems.append("other scores")
            except Exception as error:
                problems.append(error)

    askers = [threading.Thread(target=ask) for _ in range(2)]
    for asker in askers:
        asker.start()
    for number in range(20):
        set_current(own_bundles, versions[(number + 1) % 2])
        look(service)
        assert service.current.version == versions[(number + 1) % 2]
    done.set()
    for asker in askers:
        asker.join()
    assert problems == []


def test_what_was_removed_stays_so_in_the_next_version_and_what_was_added_comes_along(
    service: Service, own_bundles: Path
) -> None:
    best = service.recommend(Recommend(user="u1", k=1)).items[0].id
    service.remove_items([best])
    service.add_items([NewItem(id="added", values={"category": "garden"})])
    set_current(own_bundles, another_version(own_bundles))
    look(service)
    everything = Recommend(user="u1", k=1000, candidates=10_000, show_seen=True)
    found = {item.id for item in service.recommend(everything).items}
    assert best not in found
    assert "added" in found


def test_processes_of_one_server_hear_of_each_others_changes(own_bundles: Path, tmp_path: Path) -> None:
    service = Service(own_bundles)
    journal = Journal(tmp_path / "changes.jsonl")
    service._journal = journal
    Journal(tmp_path / "changes.jsonl").write(Change(by=0, removed=["i1"], items=[NewItem(id="theirs")]))
    service.add_items([NewItem(id="mine")])
    service.take_changes()
    service.take_changes()
    found = {item.id for item in service.recommend(Recommend(k=1000, candidates=10_000)).items}
    assert "i1" not in found
    assert {"theirs", "mine"} <= found


# canary and shadow


def test_a_canary_answers_its_share_of_users_and_always_the_same(own_bundles: Path) -> None:
    new = another_version(own_bundles)
    service = Service(own_bundles, Options(canary=(new, 0.3)))
    first = [service.rank(Rank(user=f"x{number}", items=["i1"])).version for number in range(200)]
    again = [service.rank(Rank(user=f"x{number}", items=["i1"])).version for number in range(200)]
    assert first == again
    assert 30 <= first.count(new) <= 90
    assert [version == new for version in first] == [share_of(f"x{number}") < 0.3 for number in range(200)]


def test_a_canary_that_is_not_there_is_an_error(own_bundles: Path) -> None:
    with pytest.raises(NotFound, match="there are"):
        Service(own_bundles, Options(canary=("0000000000-00000000", 0.5)))


def test_a_shadow_is_asked_too_and_differences_are_counted(own_bundles: Path) -> None:
    from recmill.serve.telemetry import Telemetry

    telemetry = Telemetry()
    service = Service(own_bundles, Options(shadow=another_version(own_bundles)), telemetry)
    for _ in range(10):
        service.rank(Rank(user="u1", items=["i1", "i2"]))
    service.close()
    text = telemetry.metrics().decode()
    lines = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    assert 1 <= float(lines["recmill_shadow_requests_total"]) <= 10
    assert float(lines["recmill_shadow_differences_total"]) == 0


# deltas


def test_a_delta_changes_answers_without_a_restart(service: Service, own_bundles: Path) -> None:
    before = scores(service)
    a_delta(own_bundles, 1)
    look(service)
    after = scores(service)
    assert service.num_deltas == service.status().deltas == 1
    assert after != before
    a_delta(own_bundles, 2, shift=0.0)  # rows as the bundle has them
    look(service)
    np.testing.assert_allclose(scores(service), before, atol=1e-7)


def test_a_version_that_is_served_again_has_its_deltas_once(service: Service, own_bundles: Path) -> None:
    old = service.current.version
    a_delta(own_bundles, 1)
    look(service)
    with_delta = scores(service)
    set_current(own_bundles, another_version(own_bundles))
    look(service)
    assert service.num_deltas == 0
    service.rollback(old)
    look(service)
    assert (service.num_deltas, scores(service)) == (1, with_delta)


def test_many_named_versions_do_not_pile_up(service: Service, own_bundles: Path) -> None:
    versions = [another_version(own_bundles, f"{number:08x}") for number in range(6)]
    for version in versions:
        assert service.recommend(Recommend(user="u1", version=version)).version == version
    assert len(service._others) <= 2


def test_deltas_published_before_the_start_are_taken_at_the_start(
    service: Service, own_bundles: Path
) -> None:
    a_delta(own_bundles, 1)
    a_delta(own_bundles, 2, shift=2.0)
    look(service)
    late = Service(own_bundles, Options(watch_seconds=60))
    late.warm_up()
    assert late.num_deltas == 2
    assert scores(late) == scores(service)
    late.close()


def test_a_damaged_delta_is_refused_until_it_is_healed(service: Service, own_bundles: Path) -> None:
    before = scores(service)
    path = a_delta(own_bundles, 1)
    file = next(path.rglob("rows.npy"))
    whole = file.read_bytes()
    file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    look(service)
    assert (service.num_deltas, scores(service)) == (0, before)
    file.write_bytes(whole)
    manifest = path / "manifest.json"
    manifest.write_text(manifest.read_text())  # copied again
    look(service)
    assert service.num_deltas == 1


@pytest.mark.parametrize("name", ["manifest.json", "rows"])
def test_a_delta_with_a_part_missing_is_refused(service: Service, own_bundles: Path, name: str) -> None:
    before = scores(service)
    part = a_delta(own_bundles, 1) / name
    shutil.rmtree(part) if part.is_dir() else part.unlink()
    look(service)
    assert (service.num_deltas, scores(service)) == (0, before)


def test_a_delta_of_another_recipe_or_out_of_turn_is_refused(service: Service, own_bundles: Path) -> None:
    before = scores(service)
    with pytest.raises(ArtifactError, match="another recipe"):
        service.apply(a_delta(own_bundles, 1, digest="other"))
    with pytest.raises(ArtifactError, match="expected 1"):
        service.apply(a_delta(own_bundles, 3))
    assert scores(service) == before


def test_a_delta_that_is_being_written_is_not_looked_at(service: Service, own_bundles: Path) -> None:
    aside = deltas_folder(own_bundles, service.current.version) / "000001.partial"
    aside.mkdir(parents=True)
    (aside / "manifest.json").write_text(json.dumps({"kind": "delta"}))
    look(service)
    assert service.num_deltas == 0


def test_evicted_keys_read_as_new_ones(service: Service, own_bundles: Path) -> None:
    bundle = Bundle.open(own_bundles)
    rows = bundle.collection("deep").rows["item"]
    keys = np.arange(1, 5)
    change = TableChange(np.empty(0, np.int64), np.empty((0, rows.dim), np.float32), keys)
    changes = Changes({"deep/item": change})
    write_delta(own_bundles, bundle.version, 1, bundle.manifest["recipe_digest"], changes, {})
    look(service)
    served = service.current.bundle.collection("deep").rows["item"]
    np.testing.assert_array_equal(served.lookup(keys), rows.absent_rows(keys))


def test_versions_are_listed_without_deltas(service: Service, own_bundles: Path) -> None:
    a_delta(own_bundles, 1)
    assert versions_of(own_bundles) == [service.current.version]


def test_the_status_tells_what_serves(service: Service, shop: Shop) -> None:
    status = service.status()
    assert status.ready
    assert status.recipe == "quickstart"
    assert status.models == ["retrieval", "ranking"]
    assert set(status.channels) <= {"two_tower", "similar", "together", "popular"}
    assert status.num_items > 50
    assert "device" in status.manifest["context_columns"]
