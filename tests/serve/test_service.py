"""Versions and deltas come and go while a service answers; what is damaged, older or foreign is refused."""

from __future__ import annotations

import asyncio
import errno
import gc
import json
import os
import shutil
import threading
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from shop import Shop

from recmill.artifacts.bundle.bundle import Bundle, current_of, publish_bundle, set_current, versions_of
from recmill.artifacts.bundle.delta import Changes, Delta, TableChange, deltas_folder, write_delta
from recmill.errors import ArtifactError, BadRequest, NotFound
from recmill.stages.serve.changes import Change
from recmill.stages.serve.config import ServeConfig
from recmill.stages.serve.messages import Event, Features, NewItem, Rank, Recommend
from recmill.stages.serve.service import Service, user_fraction
from recmill.stages.serve.shared_state import ChangeJournal


@pytest.fixture
def service(own_bundles: Path) -> Service:
    service = Service(ServeConfig(bundle=own_bundles), watch_seconds=60)
    service.warm_up()
    return service


def look(service: Service) -> None:
    service.versions.poll()


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


def damage(file: Path, index: int = -1) -> None:
    """Turn one bit around."""
    content = bytearray(file.read_bytes())
    content[index] ^= 1
    file.write_bytes(content)


def a_delta(
    own_bundles: Path, number: int, shift: float = 1.0, digest: str | None = None, version: str = ""
) -> Path:
    """Every row of the ranker's item table moved a little."""
    bundle = Bundle.open(own_bundles / version)
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


def test_a_rollback_that_cannot_be_written_changes_nothing(
    service: Service, own_bundles: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    new = another_version(own_bundles)
    set_current(own_bundles, new)
    look(service)

    def refuse(*_: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr("recmill.stages.serve.versions.set_current", refuse)
    with pytest.raises(ArtifactError, match="Read-only file system"):
        service.rollback()
    assert service.current.version == service.versions.state.version == new


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
    set_current(own_bundles, new)
    damage(next((own_bundles / new / "tables" / "deep").rglob("rows.npy")))
    look(service)
    assert service.current.version == old
    assert scores(service) == before


def test_a_version_of_another_recipe_is_refused(service: Service, own_bundles: Path) -> None:
    old = service.current.version
    set_current(own_bundles, another_version(own_bundles, recipe_digest="something else"))
    look(service)
    assert service.current.version == old


def test_a_server_of_one_version_stays_with_it_and_takes_its_deltas(own_bundles: Path) -> None:
    old, new = str(current_of(own_bundles)), another_version(own_bundles)
    service = Service(ServeConfig(bundle=own_bundles / old), watch_seconds=60)
    service.warm_up()
    set_current(own_bundles, new)
    look(service)
    assert service.current.version == old
    a_delta(own_bundles, 1, version=old)
    look(service)
    assert (service.current.version, service.current.num_deltas) == (old, 1)


def test_processes_of_a_server_of_one_version_stay_with_it(own_bundles: Path, tmp_path: Path) -> None:
    old, new = str(current_of(own_bundles)), another_version(own_bundles)
    set_current(own_bundles, new)
    services = [sharing_service(own_bundles / old, tmp_path) for _ in range(2)]
    for service in services:
        look(service)
    assert [service.current.version for service in services] == [old, old]


def test_a_named_version_answers_beside_the_current_one(service: Service, own_bundles: Path) -> None:
    new = another_version(own_bundles)
    assert service.recommend(Recommend(user="u1", version=new)).version == new
    assert service.recommend(Recommend(user="u1")).version != new
    with pytest.raises(NotFound, match="there are"):
        service.recommend(Recommend(user="u1", version="../etc"))


@pytest.mark.load
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
    service.change(Change(removed=[best]))
    service.change(Change(items=[NewItem(id="added", values={"category": "garden"})]))
    set_current(own_bundles, another_version(own_bundles))
    look(service)
    everything = Recommend(user="u1", k=1000, candidates=10_000, show_seen=True)
    found = {item.id for item in service.recommend(everything).items}
    assert best not in found
    assert "added" in found


def test_of_events_that_come_together_all_count_or_none(service: Service) -> None:
    good, bad = Event(user="new", item="i1"), Event(user="new", item="i2", values={"no such column": 1})
    with pytest.raises(BadRequest, match="no such column"):
        service.change(Change(events=[good, bad]))
    user = service.current.features(Features(user="new")).user
    assert user is not None
    assert not user.known
    assert service.change(Change(events=[good, good])).number == 2


def test_scores_name_the_version_that_gave_them_though_another_took_over_while_they_waited(
    service: Service, own_bundles: Path
) -> None:
    from recmill.stages.serve.calls import CallDispatcher
    from recmill.stages.serve.inference import Scoring, ScoringRows
    from recmill.stages.serve.telemetry import Telemetry

    new = another_version(own_bundles)
    rows = ScoringRows(pl.DataFrame({"item_id": ["i1"]}), "", seconds=60)

    async def ask(version: str) -> str:
        scoring = Scoring(CallDispatcher(service, Telemetry()))
        answer = asyncio.ensure_future(scoring.score("ranking", version, rows))
        await asyncio.sleep(0)  # it waits for others to be scored with
        service.versions.swap(own_bundles / new)
        return (await answer)[0]

    old = service.current.version
    assert asyncio.run(ask("")) == new
    service.versions.swap(own_bundles / old)
    with pytest.raises(NotFound, match=f"{new} is"):
        asyncio.run(ask(old))


@pytest.mark.load
def test_versions_that_went_leave_no_files_open_though_requests_were_under_way(
    service: Service, own_bundles: Path
) -> None:
    versions = [service.current.version, *(another_version(own_bundles, f"{n:08x}") for n in range(2))]
    done = threading.Event()
    problems: list[Exception] = []

    def ask() -> None:
        while not done.is_set():
            try:
                service.recommend(Recommend(user="u1", where="price > 1"))
            except Exception as error:
                problems.append(error)

    asker = threading.Thread(target=ask)
    asker.start()
    counts = []
    gc.collect()
    gc.disable()  # what waits for the collector would stay open
    try:
        for number in range(9):
            service.versions.swap(own_bundles / versions[(number + 1) % 3])
            counts.append(len(os.listdir("/proc/self/fd")))
    finally:
        gc.enable()
        done.set()
        asker.join()
    assert problems == []
    assert max(counts[-3:]) <= max(counts[:3]) + 5


def test_processes_of_one_server_take_each_others_changes(own_bundles: Path, tmp_path: Path) -> None:
    service = Service(ServeConfig(bundle=own_bundles, watch=False))
    journal = ChangeJournal(tmp_path)
    service.versions.journal = journal
    ChangeJournal(tmp_path).write(Change(process=0, removed=["i1"], items=[NewItem(id="theirs")]))
    service.change(Change(items=[NewItem(id="mine")]))
    service.versions.poll()
    service.versions.poll()
    found = {item.id for item in service.recommend(Recommend(k=1000, candidates=10_000)).items}
    assert "i1" not in found
    assert {"theirs", "mine"} <= found


def test_of_two_changes_of_an_item_the_later_one_counts_whatever_process_gets_it_first(
    own_bundles: Path, tmp_path: Path
) -> None:
    service = Service(ServeConfig(bundle=own_bundles, watch=False))
    service.versions.journal = ChangeJournal(tmp_path)
    others = ChangeJournal(tmp_path)
    others.write(Change(process=0, removed=["i1"]))
    others.write(Change(process=0, items=[NewItem(id="i2")]))
    service.change(Change(items=[NewItem(id="i1", values={"price": 3.0})]))
    service.change(Change(removed=["i2"]))
    service.versions.poll()
    assert shown(service, "u1") & {"i1", "i2"} == {"i1"}


# damaged versions


@pytest.mark.parametrize(
    "name", ["manifest.json", "plan/*", "graphs/rank.onnx", "items/raw.arrow", "users/keys.npy"]
)
def test_a_damaged_current_version_is_not_served_at_the_start_but_the_one_before(
    own_bundles: Path, name: str
) -> None:
    old = current_of(own_bundles)
    new = another_version(own_bundles)
    set_current(own_bundles, new)
    file = next(path for path in (own_bundles / new).glob(name) if path.is_file())
    damage(file, file.stat().st_size // 2)
    service = Service(ServeConfig(bundle=own_bundles), watch_seconds=60)
    service.warm_up()
    assert service.recommend(Recommend(user="u1")).version == old
    assert file.stem in service.status().refused[new]
    assert str(own_bundles) not in service.status().refused[new]
    service.close()


def test_a_damaged_version_is_refused_by_name_as_canary_and_in_open_bundle(own_bundles: Path) -> None:
    import recmill

    new = another_version(own_bundles)
    damage(own_bundles / new / "items" / "popularity.npy")
    service = Service(ServeConfig(bundle=own_bundles, watch=False))
    with pytest.raises(ArtifactError, match="damaged"):
        service.recommend(Recommend(user="u1", version=new))
    with pytest.raises(ArtifactError, match="damaged"):
        Service(ServeConfig(bundle=own_bundles, canary=(new, 0.5), watch=False))
    with pytest.raises(ArtifactError, match="damaged"):
        recmill.open_bundle(own_bundles / new)


def test_nothing_is_served_when_both_versions_are_damaged(own_bundles: Path) -> None:
    old = current_of(own_bundles)
    new = another_version(own_bundles)
    set_current(own_bundles, new)
    for version in (old, new):
        damage(own_bundles / str(version) / "items" / "popularity.npy")
    with pytest.raises(ArtifactError, match=f"{new} is damaged.*{old} is damaged"):
        Service(ServeConfig(bundle=own_bundles, watch=False))


def test_a_version_that_is_whole_but_cannot_be_served_is_refused_like_a_damaged_one(
    own_bundles: Path,
) -> None:
    old = current_of(own_bundles)
    new = another_version(own_bundles, models=3)
    set_current(own_bundles, new)
    service = Service(ServeConfig(bundle=own_bundles, watch=False))
    assert service.current.version == old
    assert "cannot be served" in service.status().refused[new]
    with pytest.raises(ArtifactError, match="cannot be served"):
        service.recommend(Recommend(user="u1", version=new))


def test_what_one_process_refuses_none_serves_and_one_that_is_started_again_serves_the_same(
    own_bundles: Path, tmp_path: Path
) -> None:
    old = current_of(own_bundles)
    new = another_version(own_bundles)
    first, second = (sharing_service(own_bundles, tmp_path) for _ in range(2))
    set_current(own_bundles, new)
    look(first)
    assert first.current.version == new
    damage(own_bundles / new / "items" / "popularity.npy")
    look(second)
    look(first)
    restarted = sharing_service(own_bundles, tmp_path)
    assert {one.current.version for one in (first, second, restarted)} == {old}


def test_a_process_that_is_started_again_serves_no_version_of_another_recipe(
    own_bundles: Path, tmp_path: Path
) -> None:
    old = current_of(own_bundles)
    first = sharing_service(own_bundles, tmp_path)
    set_current(own_bundles, another_version(own_bundles, recipe_digest="something else"))
    look(first)
    assert sharing_service(own_bundles, tmp_path).current.version == first.current.version == old


def test_without_a_watch_processes_serve_the_same_version_and_follow_each_others_rollback(
    own_bundles: Path, tmp_path: Path
) -> None:
    old = str(current_of(own_bundles))
    new = another_version(own_bundles)
    first = sharing_service(own_bundles, tmp_path, watch=False)
    set_current(own_bundles, new)
    second = sharing_service(own_bundles, tmp_path, watch=False)
    assert second.current.version == old
    first.rollback(new)
    look(second)
    assert second.current.version == new


def sharing_service(own_bundles: Path, folder: Path, watch: bool = True) -> Service:
    """One of several processes of a server, which share a folder."""
    from recmill.stages.serve.telemetry import Telemetry

    telemetry = Telemetry()
    telemetry.folder = folder
    return Service(ServeConfig(bundle=own_bundles, watch=watch), telemetry, watch_seconds=60)


def test_a_damaged_current_file_is_told_once_and_what_serves_goes_on(
    service: Service, own_bundles: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (own_bundles / "current").write_text("{")
    look(service)
    look(service)
    assert [record.getMessage().count("is damaged") for record in caplog.records] == [1]
    assert service.status().version == service.recommend(Recommend(user="u1")).version
    assert list(service.status().refused) == ["current"]


# canary and shadow


def shown(service: Service, user: str, **fields: Any) -> set[Any]:
    query = Recommend(user=user, k=1000, candidates=10_000, show_seen=True, **fields)
    return {item.id for item in service.recommend(query).items}


def user_of(canary: bool, share: float = 0.5) -> str:
    return next(user for user in (f"u{n}" for n in range(1, 99)) if (user_fraction(user) < share) == canary)


def test_changes_reach_canary_shadow_and_named_versions_and_those_opened_later(own_bundles: Path) -> None:
    old = str(current_of(own_bundles))
    canary, named, late = (another_version(own_bundles, f"{number:08x}") for number in range(3))
    service = Service(ServeConfig(bundle=own_bundles, canary=(canary, 0.5), watch=False))
    ours, theirs = user_of(canary=False), user_of(canary=True)
    shown(service, ours, version=named)
    gone = service.recommend(Recommend(user=theirs, k=1)).items[0].id
    service.change(Change(removed=[gone]))
    service.change(Change(items=[NewItem(id="added", values={"category": "garden"})]))
    service.change(Change(events=[Event(user=ours, item="added"), Event(user=theirs, item="added")]))
    for user, version in ((ours, None), (theirs, None), (ours, named), (ours, late), (ours, old)):
        found = shown(service, user, version=version)
        assert gone not in found
        assert "added" in found
        unseen = Recommend(user=user, k=1000, candidates=10_000, version=version)
        assert "added" not in {item.id for item in service.recommend(unseen).items}


def test_changes_of_other_processes_reach_the_canary(own_bundles: Path, tmp_path: Path) -> None:
    service = Service(
        ServeConfig(bundle=own_bundles, canary=(another_version(own_bundles), 0.5), watch=False)
    )
    service.versions.journal = ChangeJournal(tmp_path)
    ChangeJournal(tmp_path).write(Change(process=0, removed=["i1"]))
    service.versions.poll()
    assert "i1" not in shown(service, user_of(canary=True))


def test_an_item_that_was_replaced_is_so_in_versions_that_are_opened_later(
    service: Service, own_bundles: Path
) -> None:
    service.change(Change(items=[NewItem(id="i1", values={"price": 12_345.0})]))
    assert shown(service, "u1", version=another_version(own_bundles), where="price > 12000") == {"i1"}


def test_an_item_that_was_added_again_is_shown_after_a_rollback(service: Service, own_bundles: Path) -> None:
    service.change(Change(removed=["i1"]))
    set_current(own_bundles, another_version(own_bundles))
    look(service)
    service.change(Change(items=[NewItem(id="i1", values={"category": "garden"})]))
    service.rollback()
    assert "i1" in shown(service, "u1")


def test_a_canary_has_its_own_deltas(own_bundles: Path) -> None:
    canary = another_version(own_bundles)
    service = Service(ServeConfig(bundle=own_bundles, canary=(canary, 0.5)), watch_seconds=60)
    query = [Rank(user=user_of(canary=is_canary), items=["i1", "i2"]) for is_canary in (False, True)]
    before = [service.rank(one).scores for one in query]
    a_delta(own_bundles, 1, version=canary)
    service.warm_up()
    after = [service.rank(one).scores for one in query]
    assert after[0] == before[0]
    assert after[1] != before[1]
    assert (service.current.num_deltas, service.versions.named(canary).num_deltas) == (0, 1)
    service.close()


def test_a_canary_answers_its_share_of_users_and_always_the_same(own_bundles: Path) -> None:
    new = another_version(own_bundles)
    service = Service(ServeConfig(bundle=own_bundles, canary=(new, 0.3), watch=False))
    first = [service.rank(Rank(user=f"x{number}", items=["i1"])).version for number in range(200)]
    again = [service.rank(Rank(user=f"x{number}", items=["i1"])).version for number in range(200)]
    assert first == again
    assert 30 <= first.count(new) <= 90
    assert [version == new for version in first] == [
        user_fraction(f"x{number}") < 0.3 for number in range(200)
    ]


def test_a_canary_that_is_not_there_is_an_error(own_bundles: Path) -> None:
    with pytest.raises(NotFound, match="there are"):
        Service(ServeConfig(bundle=own_bundles, canary=("0000000000-00000000", 0.5), watch=False))


def test_a_shadow_is_asked_too_and_differences_are_counted(own_bundles: Path) -> None:
    from recmill.stages.serve.telemetry import Telemetry

    telemetry = Telemetry()
    service = Service(
        ServeConfig(bundle=own_bundles, shadow=another_version(own_bundles), watch=False), telemetry
    )
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
    assert service.current.num_deltas == service.status().deltas == 1
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
    assert service.current.num_deltas == 0
    service.rollback(old)
    look(service)
    assert (service.current.num_deltas, scores(service)) == (1, with_delta)


def test_many_named_versions_do_not_pile_up(service: Service, own_bundles: Path) -> None:
    versions = [another_version(own_bundles, f"{number:08x}") for number in range(6)]
    for version in versions:
        assert service.recommend(Recommend(user="u1", version=version)).version == version
    assert len(service.versions.all()) <= 3


def test_deltas_published_before_the_start_are_taken_at_the_start(
    service: Service, own_bundles: Path
) -> None:
    a_delta(own_bundles, 1)
    a_delta(own_bundles, 2, shift=2.0)
    look(service)
    late = Service(ServeConfig(bundle=own_bundles), watch_seconds=60)
    late.warm_up()
    assert late.current.num_deltas == 2
    assert scores(late) == scores(service)
    late.close()


def test_a_damaged_delta_is_refused_until_it_is_healed(service: Service, own_bundles: Path) -> None:
    before = scores(service)
    path = a_delta(own_bundles, 1)
    file = next(path.rglob("rows.npy"))
    whole = file.read_bytes()
    file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    look(service)
    assert (service.current.num_deltas, scores(service)) == (0, before)
    file.write_bytes(whole)
    manifest = path / "manifest.json"
    manifest.write_text(manifest.read_text())  # copied again
    look(service)
    assert service.current.num_deltas == 1


@pytest.mark.parametrize("name", ["manifest.json", "rows"])
def test_a_delta_with_a_part_missing_is_refused(service: Service, own_bundles: Path, name: str) -> None:
    before = scores(service)
    part = a_delta(own_bundles, 1) / name
    shutil.rmtree(part) if part.is_dir() else part.unlink()
    look(service)
    assert (service.current.num_deltas, scores(service)) == (0, before)


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"kind": "delta", "format": 1}', '{"kind": "delta", "files": 3}']
)
def test_a_delta_with_a_damaged_manifest_is_refused_once_and_the_start_goes_on(
    own_bundles: Path, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    (a_delta(own_bundles, 1) / "manifest.json").write_text(text)
    service = Service(ServeConfig(bundle=own_bundles), watch_seconds=60)
    service.warm_up()
    look(service)
    assert (service.ready, service.current.num_deltas) == (True, 0)
    assert len([record for record in caplog.records if record.levelname == "WARNING"]) == 1
    assert list(service.status().refused) == [f"{service.current.version}.deltas/000001"]
    service.close()


def test_every_damaged_byte_of_a_deltas_manifest_is_noticed(service: Service, own_bundles: Path) -> None:
    manifest = a_delta(own_bundles, 1) / "manifest.json"
    whole = manifest.read_bytes()
    for index in range(0, len(whole), 7):
        damage(manifest, index)
        with pytest.raises(ArtifactError):
            Delta.open(manifest.parent)
        manifest.write_bytes(whole)


def test_a_rollback_while_deltas_are_applied_leaves_each_version_its_own_count(
    service: Service, own_bundles: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = service.current.version, another_version(own_bundles)
    set_current(own_bundles, new)
    look(service)
    a_delta(own_bundles, 1, version=new)
    changes = Delta.changes

    def slow(delta: Delta) -> Changes:
        service.rollback(old)
        return changes(delta)

    monkeypatch.setattr(Delta, "changes", slow)
    look(service)
    counts = {one.version: one.num_deltas for one in service.versions.all()}
    assert (service.current.version, counts) == (old, {old: 0, new: 1})


def test_a_delta_of_another_recipe_or_out_of_order_is_refused(service: Service, own_bundles: Path) -> None:
    before = scores(service)
    with pytest.raises(ArtifactError, match="another recipe"):
        service.versions._apply_delta(a_delta(own_bundles, 1, digest="other"), service.current)
    with pytest.raises(ArtifactError, match="expected 1"):
        service.versions._apply_delta(a_delta(own_bundles, 3), service.current)
    assert scores(service) == before


def test_a_delta_is_taken_whole_or_not_at_all(service: Service, own_bundles: Path) -> None:
    before = scores(service)
    bundle = Bundle.open(own_bundles)
    rows = bundle.collection("deep").rows["item"]
    keys = np.arange(rows.num_rows)
    good = TableChange(keys, rows.lookup(keys) + 1, np.empty(0, np.int64))
    beyond = TableChange(keys[:1] + 10**6, rows.lookup(keys[:1]), np.empty(0, np.int64))
    narrow = TableChange(keys, rows.lookup(keys)[:, 1:], np.empty(0, np.int64))
    frame = pl.DataFrame({"nonsense": [1]})
    for number, bad in enumerate(
        (
            Changes({"deep/item": good, "deep/none": good}),
            Changes({"deep/item": good, "deep/user": narrow}),
            Changes({"deep/item": good, "deep/device": beyond}),
            Changes({"deep/item": good}, items=frame),
            Changes({"deep/item": good}, users=frame),
            Changes({"deep/item": good}, clicks=frame),
            Changes({"deep/item": good}, graphs={"rank": b"nonsense"}),
        )
    ):
        folder = deltas_folder(own_bundles, bundle.version)
        shutil.rmtree(folder, ignore_errors=True)
        write_delta(own_bundles, bundle.version, 1, bundle.manifest["recipe_digest"], bad, {})
        look(service)
        assert (number, service.current.num_deltas, scores(service)) == (number, 0, before)
        assert list(service.status().refused) == [f"{folder.name}/000001"]


def test_a_removed_item_stays_so_when_a_delta_changes_it(service: Service, own_bundles: Path) -> None:
    service.change(Change(removed=["i1"]))
    bundle = Bundle.open(own_bundles)
    assert bundle.items is not None
    changes = Changes(items=bundle.items.raw(bundle.items.indices(["i1", "i2"])))
    write_delta(own_bundles, bundle.version, 1, bundle.manifest["recipe_digest"], changes, {})
    look(service)
    assert service.current.num_deltas == 1
    assert shown(service, "u1") & {"i1", "i2"} == {"i2"}
    service.change(Change(items=[NewItem(id="i1")]))
    assert "i1" in shown(service, "u1")


def test_a_delta_that_is_being_written_is_not_looked_at(service: Service, own_bundles: Path) -> None:
    aside = deltas_folder(own_bundles, service.current.version) / "000001.partial"
    aside.mkdir(parents=True)
    (aside / "manifest.json").write_text(json.dumps({"kind": "delta"}))
    look(service)
    assert service.current.num_deltas == 0


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
    assert set(status.channels) <= {"two_tower", "similar", "co_clicks", "transitions", "ease", "popular"}
    assert status.num_items > 50
    assert "device" in status.manifest["context_columns"]
