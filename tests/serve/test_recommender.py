"""A bundle that answers: known and unknown users and items, filters, deadlines, changes while it serves."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from shop import Shop

import recmill
from recmill.artifacts.bundle.bundle import Bundle
from recmill.artifacts.checkpoint.checkpoint import Checkpoint
from recmill.errors import BadRequest, TooLate
from recmill.learner.ranking import Ranker
from recmill.learner.saved import open_learner
from recmill.stages.serve.messages import Event, Features, NewItem, Rank, RankRows, Recall, Recommend
from recmill.stages.serve.recommender import Recommender


@pytest.fixture(scope="module")
def shared(shop: Shop) -> Recommender:
    """One for tests that change nothing."""
    return recmill.open_bundle(shop.bundles)


@pytest.fixture
def own(shop: Shop) -> Recommender:
    """One of one's own, to change. Changes stay in memory."""
    return Recommender(Bundle.open(shop.bundles))


def ids(answer: object) -> list[object]:
    return [item.id for item in answer.items]  # type: ignore[attr-defined]


def somebody(recommender: Recommender) -> str:
    """A user who has clicked something."""
    users = recommender.bundle.users
    assert users is not None
    for index in range(len(users)):
        if users.raw(np.array([index]))["item_id_history"][0].len():
            return str(users.ids(np.array([index]))[0])
    raise AssertionError("nobody clicked")


# answers


def test_a_known_user_gets_k_items_best_first(shared: Recommender) -> None:
    answer = shared.recommend(Recommend(user=somebody(shared), k=20))
    scores = [item.score for item in answer.items]
    assert len(set(ids(answer))) == 20
    assert scores == sorted(scores, reverse=True)
    assert answer.degraded == []
    assert answer.version == shared.version


def test_what_was_clicked_is_not_recommended_again_unless_asked_for(shared: Recommender) -> None:
    user = somebody(shared)
    known = shared.features(Features(user=user)).user
    assert known is not None
    clicked = set(known.values["item_id_history"])
    everything = Recommend(user=user, k=1000, candidates=10_000)
    assert clicked & set(ids(shared.recommend(everything))) == set()
    assert clicked <= set(
        ids(shared.recommend(Recommend(user=user, k=1000, candidates=10_000, show_seen=True)))
    )


@pytest.mark.parametrize("user", [None, "nobody has this id", "", "\ud800", 7])
def test_an_unknown_user_gets_an_answer_too(shared: Recommender, user: str | int | None) -> None:
    answer = shared.recommend(Recommend(user=user, k=10))
    assert len(answer.items) == 10
    assert answer.degraded == []


def test_features_alone_tell_one_unknown_user_from_another(shared: Recommender) -> None:
    one = shared.recommend(Recommend(features={"country": "DE", "age_band": "18-24"}, k=50))
    other = shared.recommend(Recommend(features={"country": "US", "age_band": "65+"}, k=50))
    assert [item.score for item in one.items] != [item.score for item in other.items]


def test_recent_clicks_change_what_is_recommended_at_once(shared: Recommender) -> None:
    before = shared.recall(Recall(user="new here", k=50, channels=["two_tower"]))
    after = shared.recall(Recall(user="new here", k=50, channels=["two_tower"], recent=["i1", "i2", "i3"]))
    assert [item.recall_score for item in before.items] != [item.recall_score for item in after.items]
    assert not {"i1", "i2", "i3"} & set(ids(after))


def test_an_unknown_item_among_the_recent_ones_is_no_problem(shared: Recommender) -> None:
    assert len(shared.recommend(Recommend(user="u1", recent=["never heard of"], k=5)).items) == 5


def test_context_is_part_of_the_score(shared: Recommender) -> None:
    scores = {
        device: shared.rank(Rank(user="u1", items=["i1"], context={"device": device, "position": 1})).scores
        for device in ("phone", "desktop")
    }
    assert scores["phone"] != scores["desktop"]


def test_fewer_items_than_k_are_an_answer(shared: Recommender) -> None:
    answer = shared.recommend(Recommend(user="u1", k=50, only=["i1", "i2", "unknown"], show_seen=True))
    assert sorted(ids(answer)) == ["i1", "i2"]


@pytest.mark.parametrize("question", [{"only": []}, {"only": ["unknown"]}, {"where": "price < 0"}])
def test_an_empty_recall_is_an_answer(shared: Recommender, question: dict[str, object]) -> None:
    assert shared.recommend(Recommend(user="u1", **question)).items == []  # type: ignore[arg-type]


def test_conditions_over_any_item_column_hold_for_every_item(shared: Recommender) -> None:
    answer = shared.recommend(
        Recommend(user="u1", where="price < 30 AND category IN ('garden', 'books')", trace=True)
    )
    assert answer.trace is not None
    assert answer.items
    for item in answer.trace.items:
        assert item["price"] < 30
        assert item["category"] in ("garden", "books")


def test_excluded_items_are_never_there(shared: Recommender) -> None:
    best = ids(shared.recommend(Recommend(user="u1", k=5)))
    assert not set(best) & set(ids(shared.recommend(Recommend(user="u1", k=50, exclude=best))))


@pytest.mark.parametrize("channel", ["two_tower", "similar", "co_clicks", "popular"])
def test_each_channel_can_be_asked_alone(shared: Recommender, channel: str) -> None:
    answer = shared.recall(Recall(user=somebody(shared), k=20, channels=[channel]))
    assert answer.items
    assert {item.channel for item in answer.items} == {channel}


def test_popular_items_come_by_number_of_clicks(shared: Recommender) -> None:
    scores = [item.recall_score for item in shared.recall(Recall(k=50, channels=["popular"])).items]
    assert scores == sorted(scores, reverse=True)
    assert scores[0] > scores[-1]


def test_exact_recall_is_what_the_towers_say(shared: Recommender) -> None:
    assert shared.recaller is not None
    assert shared.recaller.tower is not None
    user_row = shared.lookup.user_row(Recall(user="u1"))
    scores = (
        shared.recaller.vectors.whole()
        @ shared.recaller.tower.vectors(user_row.features.batch(shared.recaller.tower.layout))[0]
    )
    best = shared.recaller.items.ids(np.argsort(-scores)[:10])
    answer = shared.recall(Recall(user="u1", k=10, channels=["two_tower"], show_seen=True))
    assert ids(answer) == best


def test_a_trace_says_why(shared: Recommender) -> None:
    answer = shared.recommend(Recommend(user="u1", k=3, trace=True, context={"device": "phone"}))
    trace = answer.trace
    assert trace is not None
    assert set(trace.stages) == {"user", "recall", "features", "rank"}
    assert (
        sum(
            count
            for name, count in trace.counts.items()
            if name in ("two_tower", "similar", "co_clicks", "popular")
        )
        == trace.counts["candidates"]
    )
    assert [item["item_id"] for item in trace.items] == ids(answer)
    assert trace.user["device"] == "phone"
    assert trace.user["user_id"] == "u1"
    assert len(trace.item_features) == 3


# wrong questions


@pytest.mark.parametrize(
    ("question", "words"),
    [
        ({"k": 0}, "k must be"),
        ({"k": 100_000}, "k must be"),
        ({"candidates": 10**6}, "At most"),
        ({"context": {"devise": "phone"}}, '"devise"'),
        ({"context": {"position": "first"}}, "whole number"),
        ({"features": {"price": 3}}, '"price"'),
        ({"where": "no_such_column = 1"}, "Columns of items"),
        ({"where": "price"}, "true or false"),
        ({"where": "((("}, "fails"),
        ({"where": "x" * 5000}, "characters"),
        ({"channels": ["magic"]}, '"magic"'),
    ],
)
def test_a_wrong_question_is_told_what_was_expected(
    shared: Recommender, question: dict[str, object], words: str
) -> None:
    with pytest.raises(BadRequest, match=words):
        shared.recommend(Recommend(user="u1", **question))  # type: ignore[arg-type]


# equal scores


def test_served_scores_are_those_of_the_trainer(shared: Recommender, shop: Shop) -> None:
    rows = pl.read_csv(shop.log / "events.csv", n_rows=500)
    users = pl.read_csv(shop.log / "users.csv")
    items = pl.read_csv(shop.log / "items.csv", quote_char='"')
    rows = rows.join(users, on="user_id", how="left").join(items, on="item_id", how="left")
    kept = [name for name in rows.columns if name in shared.lookup.raw_columns.kinds]
    found = shared.score(rows.select(kept))
    folder = Checkpoint.open(shop.checkpoint)
    ranker = open_learner(folder, "ranking").learner
    assert isinstance(ranker, Ranker)
    frame = shared.lookup.raw_columns.cast(rows, list(shared.lookup.raw_columns.kinds))
    expected = ranker.predict(_batch(folder, ranker, frame))
    np.testing.assert_allclose(found, expected, atol=1e-5)


def _batch(folder: Checkpoint, ranker: Ranker, frame: pl.DataFrame):  # type: ignore[no-untyped-def]
    from recmill.dataset.batch import collate

    applied = folder.plan.apply(frame, labels=False, only=ranker.layout.features)
    return collate(applied, ranker.layout, with_labels=False)


def test_ranking_by_id_equals_scoring_the_same_raw_rows(shared: Recommender) -> None:
    user, items = somebody(shared), ["i1", "i2", "i3", "not known"]
    context = {"device": "phone", "position": 3, "price_shown": 12.5, "time": 1773619079}
    known = shared.features(Features(user=user, items=items))
    assert known.user is not None
    rows = [{**known.user.values, **context, **item.values} for item in known.items]
    frame = shared.lookup.raw_columns.frame(rows, list(shared.lookup.raw_columns.kinds))
    ranked = shared.rank(Rank(user=user, items=items, context=context))
    np.testing.assert_allclose(ranked.scores, shared.score(frame.drop("clicked")), atol=1e-6)


def test_recommended_scores_are_those_of_ranking(shared: Recommender) -> None:
    answer = shared.recommend(Recommend(user="u1", k=10, context={"device": "phone"}))
    ranked = shared.rank(
        Rank(user="u1", items=[item.id for item in answer.items], context={"device": "phone"})
    )
    np.testing.assert_allclose([item.score for item in answer.items], ranked.scores, atol=1e-6)


def test_packed_rows_rank_as_ids_do(shared: Recommender) -> None:
    query = Rank(user="u1", items=["i1", "i2", "unknown"], context={"device": "phone"})
    packed = shared.packed_rows(query)
    assert packed.degraded == []
    ranked = shared.rank_rows(RankRows(user=packed.user, items=packed.items, context={"device": "phone"}))
    np.testing.assert_allclose(ranked.scores, shared.rank(query).scores, atol=1e-6)


def test_rows_of_another_bundle_are_unknown_users_and_the_answer_says_so(shared: Recommender) -> None:
    ranked = shared.rank_rows(RankRows(user=b"12345678 other", items=[b"12345678 other"]))
    assert len(ranked.scores) == 1
    assert any("another bundle" in reason for reason in ranked.degraded)


# time


def test_no_time_is_a_refusal(shared: Recommender) -> None:
    with pytest.raises(TooLate):
        shared.recommend(Recommend(user="u1", deadline_ms=1e-6))


def test_little_time_gives_the_order_of_recall_and_says_so(own: Recommender) -> None:
    own._seconds_each = 10.0  # as if ranking were very slow
    answer = own.recommend(Recommend(user="u1", k=5, deadline_ms=2_000))
    assert len(answer.items) == 5
    assert any("order of recall" in reason for reason in answer.degraded)


def test_some_time_ranks_some_candidates_and_says_so(own: Recommender) -> None:
    own._seconds_each = 0.1
    answer = own.recommend(Recommend(user="u1", k=5, candidates=500, deadline_ms=5_000))
    assert len(answer.items) == 5
    assert any("there was time for" in reason for reason in answer.degraded)


# changes


def test_a_new_item_is_recommended_from_then_on(own: Recommender) -> None:
    assert own.add_items([NewItem(id="brand new", values={"category": "garden", "price": 9.5})]) == 1
    answer = own.recommend(Recommend(user="u1", k=1000, candidates=10_000))
    assert "brand new" in ids(answer)
    assert own.features(Features(items=["brand new"])).items[0].known
    only = own.recommend(Recommend(user="u1", where="price = 9.5 AND category = 'garden'"))
    assert "brand new" in ids(only)


def test_a_removed_item_is_not_recommended_until_it_is_added_again(own: Recommender) -> None:
    best = ids(own.recommend(Recommend(user="u1", k=1)))
    assert own.remove_items([*best, "unknown"]) == 1  # type: ignore[list-item]
    everything = Recommend(user="u1", k=1000, candidates=10_000, show_seen=True)
    assert best[0] not in ids(own.recommend(everything))
    assert best[0] not in ids(own.recommend(Recommend(user="u1", only=best, show_seen=True)))  # type: ignore[arg-type]
    values = own.features(Features(items=best)).items[0].values  # type: ignore[arg-type]
    own.add_items(
        [NewItem(id=best[0], values={name: value for name, value in values.items() if name != "item_id"})]
    )  # type: ignore[arg-type]
    assert best[0] in ids(own.recommend(everything))


def test_an_event_joins_the_history_of_a_user_known_or_not(own: Recommender) -> None:
    for user in ("u1", "just arrived"):
        own.add_events([Event(user=user, item="i7", values={"clicked": 1}), Event(user=user, item="i8")])
        known = own.features(Features(user=user)).user
        assert known is not None
        assert known.known
        assert known.values["item_id_history"][-2:] == ["i7", "i8"]
        assert not {"i7", "i8"} & set(ids(own.recommend(Recommend(user=user, k=1000, candidates=10_000))))


def test_an_event_that_does_not_count_is_not_in_the_history(own: Recommender) -> None:
    own.add_events([Event(user="looks only", item="i7", values={"clicked": 0})])
    known = own.features(Features(user="looks only")).user
    assert known is not None
    assert not known.values["item_id_history"]


@pytest.mark.load
def test_answers_and_changes_side_by_side_do_not_disturb_each_other(own: Recommender) -> None:
    problems: list[BaseException] = []
    done = threading.Event()

    def ask() -> None:
        try:
            while not done.is_set():
                assert len(own.recommend(Recommend(user="u1", k=10)).items) == 10
        except BaseException as error:
            problems.append(error)

    askers = [threading.Thread(target=ask) for _ in range(3)]
    for asker in askers:
        asker.start()
    for number in range(30):
        own.add_items([NewItem(id=f"n{number}", values={"category": "books"})])
        own.add_events([Event(user=f"v{number}", item=f"n{number}")])
        own.remove_items([f"n{number - 5}"])
    done.set()
    for asker in askers:
        asker.join()
    assert problems == []


def test_the_bundle_on_disk_is_not_changed_by_serving(shop: Shop, own: Recommender) -> None:
    own.add_items([NewItem(id="i1", values={"category": "changed"})])
    own.add_events([Event(user="u1", item="i2")])
    Bundle.open(Path(shop.bundles)).verify()


def test_numbers_in_base_16_may_be_sent_as_the_log_writes_them() -> None:
    from recmill.recipe.load import load_recipe
    from recmill.stages.serve.raw import RawColumns

    columns = RawColumns(load_recipe("criteo-dlrm"))
    rows = pl.DataFrame({"c1": ["80218964", "68fd1e64", "", None], "c2": [1, 2, 3, 4]})
    found = columns.cast(rows, ["c1", "c2"])
    assert found["c1"].to_list() == [0x80218964, 0x68FD1E64, None, None]
    assert columns.typed({"c1": "80218964"}, ["c1"], "It") == {"c1": 0x80218964}
