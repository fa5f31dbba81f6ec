"""What each shape's files look like from outside."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from recmill.synthetic import criteo, recsys2021, shop
from recmill.synthetic.generate import generate
from recmill.synthetic.truth import BestScores

ROWS = 60_000


@pytest.fixture(scope="module")
def clicks(tmp_path_factory: pytest.TempPathFactory) -> pl.DataFrame:
    folder = tmp_path_factory.mktemp("criteo")
    generate("criteo", ROWS, 11, folder)
    names = ["label", *(f"i{n}" for n in range(1, 14)), *(f"c{n}" for n in range(1, 27))]
    return pl.read_csv(
        folder / "train.txt", separator="\t", has_header=False, new_columns=names, infer_schema=False
    )


def test_criteo_clicks_are_a_quarter(clicks):
    assert (clicks["label"] == "1").mean() == pytest.approx(0.256, abs=0.02)


def test_criteo_misses_values_as_planned(clicks):
    planned = [column.missing for column in (*criteo.INTEGERS, *criteo.CATEGORIES)]
    found = [clicks[name].null_count() / ROWS for name in clicks.columns[1:]]
    assert found == pytest.approx(planned, abs=0.01)


def test_criteo_integers_are_heavy_tailed_and_the_second_goes_below_zero(clicks):
    numbers = clicks.select(pl.col("^i[0-9]+$").cast(pl.Int64))
    assert numbers["i2"].min() == -2
    assert (numbers["i2"] == -1).any()
    assert all(numbers[name].min() == 0 for name in numbers.columns if name != "i2")
    assert numbers["i5"].mean() > 4 * numbers["i5"].median()
    assert all(numbers[f"i{n}"].max() <= criteo.INTEGERS[n - 1].top for n in range(1, 14))


def test_criteo_categories_are_hex_with_a_head_and_a_tail(clicks):
    assert clicks.select(pl.col("^c[0-9]+$").str.contains("^[0-9a-f]{8}$").all()).row(0) == (True,) * 26
    counts = clicks["c1"].drop_nulls().value_counts(sort=True)["count"]
    assert counts[0] > 0.03 * ROWS
    assert 0.5 < (counts == 1).mean() < 0.95
    assert clicks["c6"].drop_nulls().n_unique() == 3


def test_criteo_keeps_showing_new_ids(clicks):
    first, last = clicks["c20"].head(ROWS // 2), clicks["c20"].tail(ROWS // 10).drop_nulls()
    assert 0.2 < (~last.is_in(first.unique().to_list())).mean() < 0.7


def test_criteo_hash_never_collides():
    values = np.concatenate([criteo.hashed(column, np.arange(50_000)) for column in range(26)])
    assert len(np.unique(values)) == 26 * 50_000


def test_criteo_days_are_the_kaggle_file_in_equal_parts(tmp_path):
    generate("criteo", 1_000, 5, tmp_path / "whole")
    report = generate("criteo", 1_000, 5, tmp_path / "days", days=[0, 1, 2, 23])
    assert [path.name for path in report.files] == ["day_0", "day_1", "day_2", "day_23"]
    parts = [path.read_bytes() for path in report.files]
    assert [part.count(b"\n") for part in parts] == [250] * 4
    assert b"".join(parts) == (tmp_path / "whole" / "train.txt").read_bytes()
    assert "day_23" in report.note


def criteo_parts(seed: int) -> tuple[criteo.Model, np.ndarray, list[np.ndarray]]:
    """A model, rows over its whole log, and what each planted part adds to their logits."""
    model, index = criteo.Model(seed, 1_000_000), np.arange(0, 1_000_000, 10)
    parts = model._effects(index, model._integers(index), model._ids(index))
    return (
        model,
        index,
        [strength * model.scale * part for strength, (_, part) in zip(model.strengths, parts, strict=True)],
    )


def auc_of(logits: np.ndarray, labels: np.ndarray) -> float:
    scores = BestScores()
    scores.add(logits, labels)
    return scores.auc()


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_criteo_cannot_be_learned_without_its_crosses(seed):
    model, index, parts = criteo_parts(seed)
    labels = model.rows(index)[2]
    whole, linear = auc_of(sum(parts), labels), auc_of(sum(parts[: -len(criteo.CROSSES)]), labels)
    assert 0.78 < whole < 0.82
    assert linear < whole - 0.015


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_criteo_plants_its_truth_on_ids_that_come_back(seed):
    model, index, parts = criteo_parts(seed)
    ids = model._ids(index)
    planted = [number for number, column in enumerate(criteo.CATEGORIES) if column.pull]
    num_integers = sum(1 for column in criteo.INTEGERS if column.pull)
    rare = [part[ids[number][0] >= 500] for number, part in zip(planted, parts[num_integers:], strict=False)]
    assert sum(np.square(part).sum() for part in rare) / len(index) < 0.01 * sum(parts).var()


def test_criteo_effects_drift_so_that_the_past_is_not_quite_the_present():
    model, index, _ = criteo_parts(0)
    ids = model._ids(index)[8][0]
    first, last = (model._id_effect(8, ids, np.full(len(ids), angle)) for angle in (0.0, criteo.DRIFT))
    assert 0.8 < np.corrcoef(first, last)[0, 1] < 0.99


def test_criteo_knows_the_best_of_eval_and_of_test(tmp_path):
    best = generate("criteo", ROWS, 11, tmp_path).best
    assert list(best) == ["auc", "logloss", "auc_eval", "logloss_eval", "auc_test", "logloss_test"]
    assert best["logloss"] == pytest.approx((best["logloss_eval"] + best["logloss_test"]) / 2, abs=1e-4)


@pytest.fixture(scope="module")
def engagements(tmp_path_factory: pytest.TempPathFactory) -> pl.DataFrame:
    folder = tmp_path_factory.mktemp("recsys2021")
    generate("recsys2021", ROWS, 11, folder)
    return pl.read_csv(
        folder / "part-00000.csv",
        separator="\x01",
        has_header=False,
        new_columns=list(recsys2021.COLUMNS),
        quote_char=None,
        schema_overrides={f"column_{n}": pl.String for n in (0, 1, 3, 4, 5)},
    )


def test_recsys_has_twenty_four_columns_of_the_right_kinds(engagements):
    assert engagements.width == 24
    ids = ("tweet_id", "language", "engaged_with_user_id", "engaging_user_id")
    assert all(engagements[name].str.contains("^[0-9A-F]{32}$").all() for name in ids)
    flags = ("engaged_with_user_is_verified", "engaging_user_is_verified", "engagee_follows_engager")
    assert all(engagements[name].dtype == pl.Boolean for name in flags)
    assert set(engagements["tweet_type"]) == {"TopLevel", "Retweet", "Quote"}
    assert engagements["text_tokens"].str.contains("^101\t[0-9\t]+\t102$").all()
    media = engagements["present_media"].drop_nulls().str.split("\t")
    assert set(media.explode()) == {"Photo", "Video", "GIF"}
    assert engagements["language"].n_unique() <= 66


def test_recsys_is_in_time_order_within_28_days(engagements):
    times = engagements["tweet_timestamp"]
    assert times.is_sorted()
    assert times.max() - times.min() <= 28 * 86_400
    assert (engagements["like_timestamp"].drop_nulls() > 0).all()
    assert engagements.select((pl.col("like_timestamp") >= pl.col("tweet_timestamp")).all()).item()


def test_recsys_engages_half_of_the_time_and_mostly_likes(engagements):
    kinds = ("like", "reply", "retweet", "retweet_with_comment")
    rates = [1 - engagements[f"{kind}_timestamp"].null_count() / ROWS for kind in kinds]
    assert rates == sorted(rates, reverse=True)
    nothing = engagements.select(pl.all_horizontal(pl.col(f"{kind}_timestamp").is_null() for kind in kinds))
    assert nothing.to_series().mean() == pytest.approx(0.5, abs=0.05)


@pytest.mark.parametrize("role", ["engaging_user", "engaged_with_user"])
def test_recsys_users_never_change(engagements, role):
    columns = [name for name in engagements.columns if name.startswith(role)]
    assert engagements.select(columns).unique().height == engagements[f"{role}_id"].n_unique()


def test_recsys_tweets_never_change_and_some_are_popular(engagements):
    columns = engagements.columns[:14]
    assert engagements.select(columns).unique().height == engagements["tweet_id"].n_unique()
    counts = engagements["tweet_id"].value_counts(sort=True)["count"]
    assert counts[0] > 30
    assert (counts == 1).mean() > 0.2


def test_recsys_parquet_holds_the_same_rows(tmp_path, engagements):
    generate("recsys2021", ROWS, 11, tmp_path, format="parquet")
    table = pl.read_parquet(tmp_path / "part-00000.parquet")
    assert table.equals(engagements)


def test_recsys_parts_are_cut_between_tweets(tmp_path, monkeypatch):
    monkeypatch.setattr(recsys2021, "PART_ROWS", 4_000)
    report = generate("recsys2021", 10_000, 1, tmp_path)
    lines = [path.read_bytes().splitlines() for path in report.files]
    assert [len(part) for part in lines] == [3_072, 3_072, 3_072, 784]
    tweets = [{line.split(b"\x01")[2] for line in part} for part in lines]
    assert not tweets[0] & tweets[1]


@pytest.fixture(scope="module")
def movies(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("movielens")
    generate("movielens", ROWS, 11, folder)
    return folder


def fields_of(path: Path) -> list[list[str]]:
    return [line.split("::") for line in path.read_text(encoding="latin-1").splitlines()]


def test_movielens_ratings_parse_and_refer_to_known_users_and_movies(movies):
    ratings = fields_of(movies / "ratings.dat")
    users = {row[0] for row in fields_of(movies / "users.dat")}
    titles = {row[0]: row[1] for row in fields_of(movies / "movies.dat")}
    assert {row[0] for row in ratings} == users
    assert {row[1] for row in ratings} <= set(titles)
    assert {row[2] for row in ratings} == {"1", "2", "3", "4", "5"}
    assert 3.3 < np.mean([int(row[2]) for row in ratings]) < 3.9
    assert len(users) == round(ROWS / 165)


def test_movielens_users_never_rate_a_movie_twice(movies):
    pairs = [(row[0], row[1]) for row in fields_of(movies / "ratings.dat")]
    assert len(set(pairs)) == len(pairs) == ROWS


def test_movielens_users_rate_in_the_order_of_time(movies):
    rows = [(int(row[0]), int(row[3])) for row in fields_of(movies / "ratings.dat")]
    assert all(before < after for before, after in pairwise(rows))
    assert min(Counter(user for user, _ in rows).values()) >= 20


def test_movielens_movies_have_years_genres_gaps_and_accents(movies):
    rows = fields_of(movies / "movies.dat")
    ids = [int(row[0]) for row in rows]
    assert ids == sorted(set(ids))
    assert len(ids) < max(ids) <= 3_952
    assert all(row[1].endswith(")") and row[1][-6] == "(" for row in rows)
    assert any("é" in row[1] for row in rows)
    assert {"Drama", "Comedy"} < {genre for row in rows for genre in row[2].split("|")}
    with pytest.raises(UnicodeDecodeError):
        (movies / "movies.dat").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shop")
    generate("shop", ROWS, 11, folder)
    return folder


def test_shop_events_refer_to_known_users_and_items(store):
    events = pl.read_csv(store / "events.csv")
    users, items = (
        pl.read_csv(store / "users.csv"),
        pl.read_csv(store / "items.csv", infer_schema_length=None),
    )
    assert events.columns == ["time", "user_id", "item_id", "device", "position", "price_shown", "clicked"]
    assert users.columns == ["user_id", "country", "age_band", "signup_day"]
    assert items.columns == ["item_id", "category", "brand", "price", "title"]
    assert set(events["user_id"]) <= set(users["user_id"])
    assert set(events["item_id"]) <= set(items["item_id"])
    assert (users.height, items.height) == (ROWS // 50, ROWS // 100)
    shown = events.join(items, on="item_id")
    assert shown.select((pl.col("price_shown") <= pl.col("price") + 0.01).all()).item()


def test_shop_events_are_in_time_order_over_two_weeks(store):
    times = pl.read_csv(store / "events.csv")["time"]
    assert times.is_sorted()
    assert 13 * 86_400 < times.max() - times.min() < 14 * 86_400


def test_shop_clicks_are_rare_and_favour_the_first_positions(store):
    events = pl.read_csv(store / "events.csv")
    assert events["clicked"].mean() == pytest.approx(0.12, abs=0.02)
    assert events["device"].null_count() / ROWS == pytest.approx(0.02, abs=0.01)
    rates = dict(events.group_by("position").agg(pl.col("clicked").mean()).iter_rows())
    assert set(rates) == set(range(1, 11))
    assert rates[1] > 1.2 * rates[10]


def test_shop_never_shows_an_item_twice_on_one_page(store):
    events = pl.read_csv(store / "events.csv").with_columns(page=pl.int_range(pl.len()) // 10)
    assert events.select("page", "item_id").is_duplicated().mean() < 0.001


def test_shop_taste_shows_in_country_and_category(store):
    events = pl.read_csv(store / "events.csv")
    events = events.join(pl.read_csv(store / "users.csv"), on="user_id")
    events = events.join(pl.read_csv(store / "items.csv"), on="item_id")
    rates = (
        events.group_by("country", "category")
        .agg(pl.col("clicked").mean(), pl.len())
        .filter(pl.col("len") > 200)
    )
    assert rates["clicked"].max() > 2 * rates["clicked"].min()


def test_shop_recent_clicks_move_the_next_interest():
    truth = shop.make_truth(1, 10_000)
    history = shop.ClickHistory(np.zeros_like(truth.user_factors))
    events = truth.visits(np.arange(200), history.shift)
    history.add_clicks(events, truth.item_factors)
    row = int(np.flatnonzero(events.clicked)[0])
    one = (slice(row, row + 1),)
    seen = [getattr(events, name)[one] for name in ("users", "items", "positions", "devices", "discounts")]
    before = truth.raw_logits(*seen, np.zeros_like(history.shift))
    assert truth.raw_logits(*seen, history.shift)[0] > before[0]
