"""A small shop, made for the quickstart: events.csv, users.csv and items.csv with readable values."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import ceil
from typing import Any

import numpy as np
import polars as pl

from recmill.synthetic import files
from recmill.synthetic.draw import (
    F64,
    I64,
    Bools,
    choose,
    key_of,
    normal,
    pair,
    shuffled,
    sigmoid,
    uniform,
    zipf,
    zipf_weights,
)
from recmill.synthetic.files import GenerateJob, PartialFiles
from recmill.synthetic.truth import BestScores, calibrate, ranks_of_targets, recall

NAME = "shop"
DESCRIPTION = (
    "A shop for the quickstart: events.csv (impressions and clicks), users.csv, items.csv with headers"
)
OPTIONS: dict[str, Any] = {}

# The rate before any history; recent clicks raise later ones, to about 12% overall.
FIRST_CLICK_RATE, LOGIT_SPREAD = 0.1, 1.2
FIRST_SECOND, NUM_SECONDS, FIRST_DAY = 1_772_409_600, 14 * 86_400, 20_514  # 2 March 2026, two weeks
SLATE = 10
# Clicks of one block of visits move the users' interests for the next, never within the block.
BLOCK_VISITS, PILOT_VISITS = 256, 2_000
NUM_CLUSTERS, NUM_FACTORS = 8, 8
POPULAR_SHARE, POPULAR_EXPONENT, TASTE_EXPONENT = 0.5, 0.9, 0.7
HISTORY_FADES, HISTORY_PULL = 0.7, 0.4
MAX_ITEMS, MAX_USERS_RANKED, BLOCK_CELLS = 50_000, 4_000, 1 << 18

COUNTRIES = ("DE", "FR", "GB", "US", "ES", "IT", "PL", "SE", "JP", "BR")
AGE_BANDS = ("18-24", "25-34", "35-44", "45-54", "55+")
DEVICES, DEVICE_WEIGHTS, DEVICE_EFFECTS = (
    ("phone", "desktop", "tablet", None),
    (0.59, 0.3, 0.09, 0.02),
    (0.2, 0, -0.2, 0),
)
DISCOUNTS, DISCOUNT_WEIGHTS = (0.0, 0.05, 0.1, 0.2, 0.3), (0.55, 0.15, 0.15, 0.1, 0.05)
# One category for each cluster, with the noun its titles end in.
CATEGORIES = ("shoes", "books", "kitchen", "garden", "audio", "toys", "bags", "outdoor")
NOUNS = ("sneaker", "novel", "pan", "lamp", "speaker", "puzzle", "backpack", "tent")
MAKERS = ("Alder", "Birch", "Cedar", "Dune", "Ember", "Fjord")
LINES = ("North", "Bright", "Old", "Pure", "Swift", "Kind", "Grand", "Plain")
LOOKS = ("Red", "Blue", "Soft", "Light", "Classic", "Compact", "Green", "Deluxe", "Simple", "Warm")


def write(job: GenerateJob, output: PartialFiles) -> tuple[dict[str, float], str]:
    """Write the three files; scores are measured over the last tenth of events and on last clicks."""
    output.claim(["events.csv", "users.csv", "items.csv"])
    truth = make_truth(job.seed, job.rows)
    history = ClickHistory(np.zeros((len(truth.mixture), NUM_FACTORS)))
    scores = BestScores()
    num_visits, first_held_out = ceil(job.rows / SLATE), job.rows - ceil(job.rows / 10)
    with output.open("events.csv") as file:
        for first, last in files.chunks(0, num_visits, BLOCK_VISITS):
            events = truth.visits(np.arange(first, last), history.shift).cut(job.rows - first * SLATE)
            files.write_rows(file, events.frame(truth, num_visits), ",", header=first == 0)
            held_out = slice(max(first_held_out - first * SLATE, 0), None)
            scores.add(events.logits[held_out], events.clicked[held_out])
            history.add_clicks(events, truth.item_factors)
            job.progress(min(last * SLATE, job.rows))
    files.write_table(output, "users.csv", truth.user_table())
    files.write_table(output, "items.csv", truth.item_table())
    return scores.best() | recall(_last_click_ranks(truth, history), (10, 50)), _note()


def _note() -> str:
    return (
        "Clicks are drawn from soft clusters of users (partly shown by country and age) and items (shown by "
        "category and brand), hidden factors, position, discount, device and the user's recent clicks. best: "
        "auc and logloss of the true probabilities over the last tenth of events; recall@k of each user's "
        "last click on an item new to that user, ranked by the true probability of being shown and clicked among "
        f"items not clicked before (at most {MAX_USERS_RANKED:,} users)."
    )


@dataclass(frozen=True)
class Impressions:
    """Impressions of some visits, in log order."""

    visits: I64
    users: I64
    items: I64
    positions: I64
    devices: I64
    discounts: I64
    logits: F64
    clicked: Bools

    def cut(self, num_rows: int) -> Impressions:
        """The first rows only; the last visit of a log may be cut short."""
        return Impressions(*(getattr(self, name)[:num_rows] for name in self.__dataclass_fields__))

    def frame(self, truth: ShopTruth, num_visits: int) -> pl.DataFrame:
        # All items of one visit are shown in the same second, and visits are in time order.
        seconds = FIRST_SECOND + self.visits * NUM_SECONDS // num_visits
        price = truth.price[self.items] * (1 - np.asarray(DISCOUNTS)[self.discounts])
        return pl.DataFrame(
            {
                "time": seconds,
                "user_id": truth.user_names.gather(self.users),
                "item_id": truth.item_names.gather(self.items),
                "device": pl.Series(DEVICES).gather(self.devices),
                "position": self.positions,
                "price_shown": price,
                "clicked": self.clicked.astype(np.int8),
            }
        )


@dataclass
class ClickHistory:
    """Clicks of users so far, and the shift of their interests."""

    shift: F64
    clicks: list[tuple[I64, I64]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.shift_before_last_click = self.shift.copy()

    def add_clicks(self, events: Impressions, item_factors: F64) -> None:
        users, items = events.users[events.clicked], events.items[events.clicked]
        self.clicks.append((users, items))
        clickers, num_clicks = np.unique(users, return_counts=True)
        self.shift_before_last_click[clickers] = self.shift[clickers]
        self.shift[clickers] *= HISTORY_FADES
        # Interests lean towards the mean of what was clicked: many clicks do not push harder than one.
        weight_U = np.zeros(len(self.shift))
        weight_U[clickers] = (1 - HISTORY_FADES) / num_clicks
        np.add.at(self.shift, users, weight_U[users, None] * item_factors[items])

    def all_clicks(self) -> tuple[I64, I64]:
        return np.concatenate([users for users, _ in self.clicks]), np.concatenate(
            [items for _, items in self.clicks]
        )


@dataclass(frozen=True)
class ShopTruth:
    """Users and items with their hidden factors: one row of each array is one user or one item."""

    seed: int
    country: I64
    age: I64
    mixture: F64
    user_factors: F64
    activity: F64
    thrift: F64
    busy_order: I64
    item_cluster: I64
    category: I64
    brand: I64
    item_factors: F64
    quality: F64
    price: F64
    popular_order: I64
    cluster_order: I64
    cluster_starts: I64
    user_names: pl.Series
    item_names: pl.Series
    fit: tuple[float, float] = (1.0, 0.0)

    def key(self, *names: object) -> int:
        return key_of(self.seed, NAME, *names)

    def visits(self, visits: I64, shift: F64) -> Impressions:
        """Draw the visitors, the items shown and the clicks."""
        rank = zipf(uniform(self.key("visitor"), visits), len(self.busy_order), 0.5)
        users = self.busy_order[rank]
        device = choose(uniform(self.key("device"), visits), DEVICE_WEIGHTS)
        items = self._slates(visits, users).ravel()
        rows = np.repeat(visits, SLATE) * SLATE + np.tile(np.arange(SLATE), len(visits))
        users, device = np.repeat(users, SLATE), np.repeat(device, SLATE)
        positions = rows % SLATE + 1
        discounts = choose(uniform(self.key("discount"), rows), DISCOUNT_WEIGHTS)
        raw = self.raw_logits(users, items, positions, device, discounts, shift)
        logits = raw * self.fit[0] + self.fit[1]
        clicked = uniform(self.key("click"), rows) < sigmoid(logits)
        return Impressions(rows // SLATE, users, items, positions, device, discounts, logits, clicked)

    def raw_logits(
        self, users: I64, items: I64, positions: I64, devices: I64, discounts: I64, shift: F64
    ) -> F64:
        shifted_taste = self.user_factors[users] + HISTORY_PULL * shift[users]
        fit = np.einsum("nd,nd->n", shifted_taste, self.item_factors[items]) / NUM_FACTORS**0.5
        context = np.asarray(DEVICE_EFFECTS)[devices] - 0.13 * (positions - 1)
        bargain = (3.0 + 3.0 * self.thrift[users]) * np.asarray(DISCOUNTS)[discounts]
        logits: F64 = 1.1 * fit + self.quality[items] + self.activity[users] + context + bargain
        return logits

    def _slates(self, visits: I64, users: I64) -> I64:
        """Ten different items for each visit, half of them popular, half of them near the user's taste."""
        num_drawn = 2 * SLATE
        cells = visits[:, None] * num_drawn + np.arange(num_drawn)
        draws, rank_draws = uniform(self.key("cluster shown"), cells), uniform(self.key("item shown"), cells)
        popular = self.popular_order[zipf(rank_draws, len(self.item_cluster), POPULAR_EXPONENT)]
        edges = np.cumsum(self.mixture[users], axis=1)[:, None, :-1]
        cluster = np.sum(draws[:, :, None] >= edges, axis=2)
        size = np.diff(self.cluster_starts)[cluster]
        rank = zipf(rank_draws, size, TASTE_EXPONENT)
        near = self.cluster_order[self.cluster_starts[cluster] + rank]
        drawn = np.where(uniform(self.key("popular"), cells) < POPULAR_SHARE, popular, near)
        # Repeats go to the end, so the first ten are different unless the shop is tiny.
        same = drawn[:, :, None] == drawn[:, None, :]
        repeats = np.tril(same, -1).any(axis=2)
        return np.take_along_axis(drawn, np.argsort(repeats, axis=1, kind="stable"), axis=1)[:, :SLATE]

    def probability_shown(self, users: I64) -> F64:
        """The probability that each item fills one position of a slate, for each user."""
        probabilities = np.zeros((len(users), len(self.item_cluster)))
        probabilities[:, self.popular_order] = POPULAR_SHARE * zipf_weights(
            len(self.item_cluster), POPULAR_EXPONENT
        )
        for cluster in range(NUM_CLUSTERS):
            start, stop = self.cluster_starts[cluster : cluster + 2]
            weights = zipf_weights(stop - start, TASTE_EXPONENT)
            members = self.cluster_order[start:stop]
            probabilities[:, members] += (1 - POPULAR_SHARE) * self.mixture[users, cluster][:, None] * weights
        return probabilities

    def user_table(self) -> pl.DataFrame:
        days_ago = (800 * uniform(self.key("signup"), np.arange(len(self.country))) ** 2).astype(np.int32)
        return pl.DataFrame(
            {
                "user_id": self.user_names,
                "country": pl.Series(COUNTRIES).gather(self.country),
                "age_band": pl.Series(AGE_BANDS).gather(self.age),
                "signup_day": pl.Series(FIRST_DAY - 1 - days_ago).cast(pl.Date),
            }
        )

    def item_table(self) -> pl.DataFrame:
        looks = (len(LOOKS) * uniform(self.key("look"), np.arange(len(self.price)))).astype(np.int64)
        brands = [f"{LINES[brand // len(MAKERS)]} {MAKERS[brand % len(MAKERS)]}" for brand in self.brand]
        words = zip(looks, brands, self.category, strict=True)
        return pl.DataFrame(
            {
                "item_id": self.item_names,
                "category": pl.Series(CATEGORIES).gather(self.category),
                "brand": brands,
                "price": self.price,
                "title": [f"{LOOKS[look]} {brand} {NOUNS[category]}" for look, brand, category in words],
            }
        )


def make_truth(seed: int, rows: int) -> ShopTruth:
    """Fifty impressions a user and a hundred an item, with click rates fitted to the planned ones."""
    num_users = max(20, rows // 50)
    num_items = max(80, min(MAX_ITEMS, rows // 100))
    truth = ShopTruth(seed=seed, **_users(seed, num_users), **_items(seed, num_items))
    # Visits before the first one of the log: the same truth, other draws.
    pilot = truth.visits(np.arange(2**40, 2**40 + PILOT_VISITS), np.zeros((num_users, NUM_FACTORS)))
    fields = {name: getattr(truth, name) for name in ShopTruth.__dataclass_fields__}
    return ShopTruth(**{**fields, "fit": calibrate(pilot.logits, FIRST_CLICK_RATE, LOGIT_SPREAD)})


def _centers(seed: int) -> F64:
    return normal(key_of(seed, NAME, "centers"), np.arange(NUM_CLUSTERS * NUM_FACTORS)).reshape(
        NUM_CLUSTERS, -1
    )


def _users(seed: int, num_users: int) -> dict[str, Any]:
    def drawn(name: str, *columns: I64) -> F64:
        return normal(key_of(seed, NAME, "users", name), pair(*columns) if len(columns) == 2 else columns[0])

    users, clusters, factors = np.arange(num_users), np.arange(NUM_CLUSTERS), np.arange(NUM_FACTORS)
    country = zipf(uniform(key_of(seed, NAME, "country"), users), len(COUNTRIES), 0.8)
    age = choose(uniform(key_of(seed, NAME, "age"), users), [0.2, 0.3, 0.22, 0.16, 0.12])
    leaning = drawn("by country", country[:, None], clusters) + drawn("by age", age[:, None], clusters)
    leaning = np.exp(1.3 * leaning + 0.8 * drawn("own", users[:, None], clusters))
    mixture = leaning / leaning.sum(axis=1, keepdims=True)
    return {
        "country": country,
        "age": age,
        "mixture": mixture,
        "user_factors": 1.4 * mixture @ _centers(seed) + 0.5 * drawn("factors", users[:, None], factors),
        "activity": 0.4 * drawn("activity", users),
        "thrift": 0.5 * drawn("thrift", users),
        "busy_order": shuffled(key_of(seed, NAME, "busy"), num_users),
        "user_names": pl.Series([f"u{user + 1}" for user in users]),
    }


def _items(seed: int, num_items: int) -> dict[str, Any]:
    items = np.arange(num_items)

    def key(name: str) -> int:
        return key_of(seed, NAME, "items", name)

    # Clusters take turns, so that each of them has items however small the shop is.
    cluster = shuffled(key("cluster"), num_items) % NUM_CLUSTERS
    stray = (NUM_CLUSTERS * uniform(key("stray"), items)).astype(np.int64)
    category = np.where(uniform(key("strays"), items) < 0.1, stray, cluster)
    maker = zipf(uniform(key("maker"), items), len(MAKERS), 0.5)
    line = np.where(uniform(key("other line"), items) < 0.25, stray, cluster)
    own = normal(key("factors"), pair(items[:, None], np.arange(NUM_FACTORS)))
    popular = shuffled(key("popular"), num_items)
    by_cluster = popular[np.argsort(cluster[popular], kind="stable")]
    return {
        "item_cluster": cluster,
        "category": category,
        "brand": line * len(MAKERS) + maker,
        "item_factors": _centers(seed)[cluster] + 0.5 * own,
        "quality": 0.35 * normal(key("quality"), items) + 0.15 * normal(key("maker quality"), maker),
        "price": np.round(np.exp(3.2 + 0.8 * normal(key("price"), items)), 2),
        "popular_order": popular,
        "cluster_order": by_cluster,
        "cluster_starts": np.searchsorted(cluster[by_cluster], np.arange(NUM_CLUSTERS + 1)),
        "item_names": pl.Series([f"i{item + 1}" for item in items]),
    }


def _last_click_ranks(truth: ShopTruth, history: ClickHistory) -> I64:
    """The rank of each user's last click, for users whose last click was on an item new to them."""
    users, items = history.all_clicks()
    last_click = len(users) - 1 - np.unique(users[::-1], return_index=True)[1]
    first_of_pair = np.unique(pair(users, items), return_index=True)[1]
    targets = np.intersect1d(last_click, first_of_pair)
    targets = targets[:: max(1, ceil(len(targets) / MAX_USERS_RANKED))]
    ranks = [np.zeros(0, dtype=np.int64)]
    for first, last in files.chunks(0, len(targets), max(1, BLOCK_CELLS // len(truth.item_cluster))):
        ranks.append(_ranks(truth, history, users, items, targets[first:last]))
    return np.concatenate(ranks)


def _ranks(truth: ShopTruth, history: ClickHistory, clickers: I64, clicked: I64, targets: I64) -> I64:
    """Ranks of the clicks with indices `targets`, each the last of its user."""
    users = clickers[targets]
    num_items = len(truth.item_cluster)
    grid_U, grid_I = np.repeat(users, num_items), np.tile(np.arange(num_items), len(users))
    middle = np.full(len(grid_U), SLATE // 2)
    plain = np.zeros(len(grid_U), dtype=np.int64)
    raw = truth.raw_logits(grid_U, grid_I, middle, plain, plain, history.shift_before_last_click)
    probability_clicked = sigmoid(raw * truth.fit[0] + truth.fit[1]).reshape(len(users), num_items)
    seen = np.zeros((len(users), num_items), dtype=np.bool_)
    row_of_user = np.full(len(truth.mixture), -1)
    row_of_user[users] = np.arange(len(users))
    known = row_of_user[clickers] >= 0
    seen[row_of_user[clickers[known]], clicked[known]] = True
    seen[np.arange(len(users)), clicked[targets]] = False
    return ranks_of_targets(probability_clicked * truth.probability_shown(users), clicked[targets], seen)
