"""What each shape's files look like from outside."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from recmill.logistic import LogisticRegression, bucket_edges, hashed
from recmill.metrics import exact_auc
from recmill.synthetic import criteo, recsys2021, shop
from recmill.synthetic.criteo_columns import INTEGERS, Columns
from recmill.synthetic.generate import generate

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


def test_criteo_misses_as_many_values_as_the_kaggle_log(clicks):
    rates = {
        "i1": 0.45, "i2": 0, "i3": 0.21, "i4": 0.21, "i5": 0.03, "i6": 0.22, "i7": 0.04, "i12": 0.77, "i13": 0.21,
        "c1": 0, "c3": 0.03, "c6": 0.12, "c19": 0.44, "c22": 0.76, "c26": 0.44,
    }  # fmt: skip
    found = {name: clicks[name].null_count() / ROWS for name in rates}
    assert found == pytest.approx(rates, abs=0.015)


def test_criteo_gaps_click_less_or_more_as_in_the_kaggle_log(clicks):
    clicked = {
        name: (clicks.filter(pl.col(name).is_null())["label"] == "1").mean() for name in clicks.columns
    }
    assert max(clicked[name] for name in ("i1", "i5", "i6", "i7")) < 0.22
    assert min(clicked[name] for name in ("i3", "i4")) > 0.27


def test_criteo_columns_are_nearly_functions_of_each_other_or_independent(clicks):
    assert normalised_mutual_information(clicks, "c12", "c21") > 0.97
    assert normalised_mutual_information(clicks, "c16", "c4") > 0.9
    assert normalised_mutual_information(clicks, "c15", "c18") > 0.85
    assert normalised_mutual_information(clicks, "c5", "c8") < 0.02
    assert clicks.select("c13", "c11").n_unique() == clicks["c11"].n_unique()


def normalised_mutual_information(rows: pl.DataFrame, left: str, right: str) -> float:
    single = entropy(rows, left) + entropy(rows, right)
    return 2 * (single - entropy(rows, left, right)) / single


def entropy(rows: pl.DataFrame, *columns: str) -> float:
    shares = rows.group_by(columns).len()["len"].to_numpy() / rows.height
    return float(-(shares * np.log(shares)).sum())


def test_criteo_integers_are_heavy_tailed_and_the_second_goes_below_zero(clicks):
    numbers = clicks.select(pl.col("^i[0-9]+$").cast(pl.Int64))
    assert numbers["i2"].min() == -2
    assert (numbers["i2"] == -1).any()
    assert all(numbers[name].min() == 0 for name in numbers.columns if name != "i2")
    assert numbers["i5"].mean() > 4 * numbers["i5"].median()
    assert all(numbers[name].max() <= column.top for name, column in INTEGERS.items())


def test_criteo_categories_are_hex_with_a_head_and_a_tail(clicks):
    assert clicks.select(pl.col("^c[0-9]+$").str.contains("^[0-9a-f]{8}$").all()).row(0) == (True,) * 26
    counts = clicks["c3"].drop_nulls().value_counts(sort=True)["count"]
    assert counts[0] > 0.02 * ROWS
    assert 0.5 < (counts == 1).mean() < 0.95
    assert clicks["c20"].drop_nulls().n_unique() == 3


def test_criteo_keeps_showing_new_ids(clicks):
    first, last = clicks["c3"].head(ROWS // 2), clicks["c3"].tail(ROWS // 10).drop_nulls()
    assert 0.3 < (~last.is_in(first.unique().to_list())).mean() < 0.7


def test_criteo_days_are_the_kaggle_file_in_equal_parts(tmp_path):
    generate("criteo", 1_000, 5, tmp_path / "whole")
    report = generate("criteo", 1_000, 5, tmp_path / "days", days=[0, 1, 2, 23])
    assert [path.name for path in report.files] == ["day_0", "day_1", "day_2", "day_23"]
    parts = [path.read_bytes() for path in report.files]
    assert [part.count(b"\n") for part in parts] == [250] * 4
    assert b"".join(parts) == (tmp_path / "whole" / "train.txt").read_bytes()
    assert "day_23" in report.note


@pytest.mark.parametrize("seed", [0, 1])
def test_criteo_cannot_be_learned_column_by_column(seed):
    model, index = criteo.Model(seed, 30_000), np.arange(30_000)
    columns = Columns(seed, 30_000, index)
    columns.open_gaps(model.thresholds)
    _, logits, labels = model.rows(index)
    num_joint = len(criteo.AFFINITIES) + len(criteo.RESPONSES) + 2
    parts = [
        strength * part for strength, (_, part) in zip(model.strengths, criteo.effects(columns), strict=True)
    ]
    alone = columns.gap_effects() + sum(parts[:-num_joint])
    assert 0.79 < exact_auc(labels, logits) < 0.83
    assert exact_auc(labels, alone) < exact_auc(labels, logits) - 0.03


@pytest.mark.parametrize("seed", [0, 1])
def test_on_criteo_counts_trees_beat_a_logistic_regression_as_on_real_rows(seed):
    lightgbm = pytest.importorskip("lightgbm")
    frame, _, labels = criteo.Model(seed, 45_000).rows(np.arange(45_000))
    counts = frame.select(pl.col(list(INTEGERS)).cast(pl.Float64).fill_null(-10)).to_numpy()
    train, test = slice(0, 30_000), slice(30_000, None)
    options = {"objective": "binary", "num_leaves": 15, "num_threads": 1, "verbosity": -1}
    trees = lightgbm.train(options, lightgbm.Dataset(counts[train], labels[train]), 60)
    slots = hashed(
        [np.searchsorted(bucket_edges(column[train]), column, side="right") for column in counts.T]
    )
    regression = LogisticRegression().fit(slots[train], labels[train])
    found = exact_auc(labels[test], regression.predict(slots[test]))
    assert found > 0.63
    assert exact_auc(labels[test], trees.predict(counts[test])) > found + 0.002


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
