"""MovieLens 1M's layout: ratings.dat, users.dat and movies.dat, fields separated by two colons, in latin-1."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import polars as pl

from recmill.synthetic import files
from recmill.synthetic.draw import (
    F64,
    I64,
    Bools,
    bits,
    choose,
    key_of,
    normal,
    pair,
    sigmoid,
    uniform,
    zipf,
)
from recmill.synthetic.files import GenerateJob, PartialFiles
from recmill.synthetic.truth import BestScores, ranks_of_targets, recall

NAME = "movielens"
DESCRIPTION = "MovieLens 1M layout: ratings.dat, users.dat, movies.dat with '::' between fields, latin-1"
OPTIONS: dict[str, Any] = {}

RATINGS_PER_USER = 165
MIN_MOVIES, MAX_MOVIES, MAX_MOVIE_ID = 300, 3_883, 3_952
FIRST_SECOND, LAST_SECOND = 956_703_932, 1_046_454_590
NUM_FACTORS = 6
# Users are processed in blocks whose scores for all movies have at most this many cells.
BLOCK_CELLS = 1 << 20
# Ratings above each threshold of liking, in steps of the noise; chosen for a mean near MovieLens's 3.6.
THRESHOLDS = (-2.9, -1.5, 0.4, 2.5)

# fmt: off
GENRES = (
    "Drama", "Comedy", "Action", "Thriller", "Romance", "Horror", "Adventure", "Sci-Fi", "Children's",
    "Crime", "War", "Documentary", "Musical", "Mystery", "Animation", "Fantasy", "Western", "Film-Noir",
)
AGES = (1, 18, 25, 35, 45, 50, 56)
FIRST_WORDS = (
    "Broken", "Café", "Silent", "Señor", "Crimson", "Last", "Été", "Lost", "Paper", "Über", "Golden",
    "Midnight", "Distant", "Naïve", "Winter", "Electric", "Forgotten", "Perfect", "Wild", "Blue", "Secret",
)
SECOND_WORDS = (
    "River", "Misérables", "City", "Promise", "Kingdom", "Fiancée", "Garden", "Stranger", "Highway", "Mañana",
    "Station", "Empire", "Mirror", "Summer", "Detective", "Orchestra", "Harbor", "Letters", "Machine", "Road",
)
ENDINGS = ("", "", "", ", The", " II", " Returns", " of Love", ", A", " at Dawn")
# fmt: on


def write(job: GenerateJob, output: PartialFiles) -> tuple[dict[str, float], str]:
    """Write the three files; the best scores are measured over all ratings and every user's last one."""
    output.claim(["ratings.dat", "users.dat", "movies.dat"])
    truth = make_truth(job.seed, job.rows)
    scores, ranks, done = BestScores(), [], 0
    step = max(1, BLOCK_CELLS // len(truth.movie_ids))
    with output.open("ratings.dat") as file:
        for first, last in files.chunks(0, len(truth.num_ratings), step):
            block = truth.rate(first, last)
            file.write(block.lines())
            scores.add(block.logits, block.ratings >= 4)
            ranks.append(block.last_ranks)
            done += len(block.ratings)
            job.progress(done)
    with output.open("users.dat") as file:
        file.write(_lines(truth.user_lines(), "ascii"))
    with output.open("movies.dat") as file:
        file.write(_lines(truth.movie_lines(), "latin-1"))
    return scores.best() | recall(np.concatenate(ranks), (10, 50)), _note()


def _note() -> str:
    return (
        "Which movie a user rates next follows its popularity and the user's taste; the rating follows "
        "taste, movie and user through six hidden factors and genres liked by gender and age. best: auc and "
        "logloss of rating >= 4 over all ratings under the true probabilities; recall@k of each user's last "
        "rated movie, ranked by the true probability of being rated next among movies not rated before."
    )


def _lines(lines: list[str], encoding: str) -> bytes:
    return "".join(f"{line}\n" for line in lines).encode(encoding)


@dataclass(frozen=True)
class RatingBlock:
    """All ratings of consecutive users, each user's in time order."""

    user_ids: I64
    movie_ids: I64
    ratings: I64
    seconds: I64
    logits: F64  # of rating >= 4
    last_ranks: I64  # rank of each user's last movie by the true scores; users with one rating count too

    def lines(self) -> bytes:
        columns = (self.user_ids, self.movie_ids, self.ratings, self.seconds)
        frame = pl.DataFrame({f"field{i}": column for i, column in enumerate(columns)})
        text = frame.select(pl.concat_str(pl.all().cast(pl.String), separator="::")).to_series()
        return ("\n".join(text.to_list()) + "\n").encode("ascii")


@dataclass(frozen=True)
class MovieTruth:
    """Users and movies with their hidden factors. In names of arrays, U is users and M movies."""

    seed: int
    num_ratings: I64
    gender: I64
    age: I64
    movie_ids: I64
    movie_genres: Bools
    popularity: F64
    quality: F64
    genre_taste: F64
    user_factors: F64
    movie_factors: F64

    def key(self, *names: object) -> int:
        return key_of(self.seed, NAME, *names)

    def rate(self, first: int, last: int) -> RatingBlock:
        """Draw the ratings of users first..last-1."""
        users = np.arange(first, last)
        liking_UM = self._liking(users)
        appeal_UM = self.popularity + 0.9 * liking_UM
        order_UM = self._order(users, appeal_UM)
        counts = self.num_ratings[users]
        rated_UM = np.arange(order_UM.shape[1]) < counts[:, None]
        rows, ranks = np.nonzero(rated_UM)
        movies = order_UM[rows, ranks]
        logits_by_threshold = self._logits(users[rows], movies, liking_UM[rows, movies])
        return RatingBlock(
            users[rows] + 1,
            self.movie_ids[movies],
            self._ratings(users[rows], movies, logits_by_threshold),
            self._seconds(users, rows, ranks),
            logits_by_threshold[2],
            _last_ranks(appeal_UM, order_UM, counts),
        )

    def _liking(self, users: I64) -> F64:
        genre_taste_UM = (
            self.genre_taste[users] @ (self.movie_genres / self.movie_genres.sum(axis=1, keepdims=True)).T
        )
        return np.asarray(self.user_factors[users] @ self.movie_factors.T + genre_taste_UM)

    def _order(self, users: I64, appeal: F64) -> I64:
        """The order in which users would rate all movies: the next one is drawn by exp(appeal)."""
        cells = pair(users[:, None], np.arange(appeal.shape[1])[None, :])
        # Sorting by appeal plus Gumbel noise is the same as drawing one by one without repeats.
        waits = -np.log1p(-uniform(self.key("wait"), cells))
        return np.argsort(np.log(np.maximum(waits, 1e-300)) - appeal, axis=1, kind="stable")

    def _logits(self, users: I64, movies: I64, liking: F64) -> list[F64]:
        level = 1.3 * liking + self.quality[movies] + 0.6 * normal(self.key("mood"), users)
        return [level - threshold for threshold in THRESHOLDS]

    def _ratings(self, users: I64, movies: I64, logits: list[F64]) -> I64:
        draws = uniform(self.key("rating"), pair(users, movies))
        ratings = np.ones(len(users), dtype=np.int64)
        for threshold_logits in logits:
            ratings += draws < sigmoid(threshold_logits)
        return ratings

    def _seconds(self, users: I64, rows: I64, ranks: I64) -> I64:
        """Users rate in bursts: seconds apart, and now and then days apart."""
        where = pair(users[rows], ranks)
        gap = 1 + (-40.0 * np.log1p(-uniform(self.key("gap"), where))).astype(np.int64)
        pause = (uniform(self.key("pause"), where) < 0.01) * (200_000 * uniform(self.key("days"), where))
        elapsed = np.cumsum(gap + pause.astype(np.int64))
        first_of_user = np.searchsorted(rows, np.arange(len(users)))
        since_start = elapsed - elapsed[first_of_user][rows]
        joined = LAST_SECOND - FIRST_SECOND - 20_000_000
        start = FIRST_SECOND + (joined * uniform(self.key("joined"), users) ** 3).astype(np.int64)
        return start[rows] + since_start

    def user_lines(self) -> list[str]:
        users = np.arange(len(self.num_ratings))
        jobs = (21 * uniform(self.key("occupation"), users)).astype(np.int64)
        zips = (100_000 * uniform(self.key("zip"), users)).astype(np.int64)
        return [
            f"{user + 1}::{'FM'[gender]}::{AGES[age]}::{job}::{zip_code:05d}"
            for user, gender, age, job, zip_code in zip(users, self.gender, self.age, jobs, zips, strict=True)
        ]

    def movie_lines(self) -> list[str]:
        titles = _titles(self.key("title"), len(self.movie_ids))
        return [
            f"{movie_id}::{title}::{'|'.join(sorted(np.array(GENRES)[has]))}"
            for movie_id, title, has in zip(self.movie_ids, titles, self.movie_genres, strict=True)
        ]


def make_truth(seed: int, rows: int) -> MovieTruth:
    """About 165 ratings a user, and as many movies as a log of this size would show."""

    def key(*names: object) -> int:
        return key_of(seed, NAME, *names)

    num_users = max(1, round(rows / RATINGS_PER_USER))
    num_movies = min(MAX_MOVIES, max(MIN_MOVIES, round(5 * rows**0.5)))
    users, movies, factors, genres = (np.arange(n) for n in (num_users, num_movies, NUM_FACTORS, len(GENRES)))
    gender = choose(uniform(key("gender"), users), [0.283, 0.717])
    age = choose(uniform(key("age"), users), [0.037, 0.183, 0.347, 0.198, 0.091, 0.082, 0.062])
    group = gender * len(AGES) + age
    fame = np.log1p(np.argsort(bits(key("fame"), movies)).argsort())
    own_taste = normal(key("own taste"), pair(users[:, None], genres[None, :]))
    group_taste = normal(key("group taste"), pair(group[:, None], genres[None, :]))
    quality = 0.5 * normal(key("quality"), movies) - 0.12 * (fame - fame.mean())
    return MovieTruth(
        seed=seed,
        num_ratings=_ratings_per_user(key("activity"), num_users, num_movies, rows),
        gender=gender,
        age=age,
        movie_ids=_movie_ids(key("movie id"), num_movies),
        movie_genres=_genres(key("genres"), movies),
        popularity=-0.9 * fame,
        quality=quality,
        genre_taste=0.7 * group_taste + 0.5 * own_taste,
        user_factors=normal(key("user factors"), pair(users[:, None], factors[None, :])) / NUM_FACTORS**0.5,
        movie_factors=normal(key("movie factors"), pair(movies[:, None], factors[None, :])),
    )


def _ratings_per_user(key: int, num_users: int, num_movies: int, rows: int) -> I64:
    """Heavy-tailed counts that add up to `rows`; 20 or more where possible, never near all movies."""
    most, least = num_movies * 7 // 10, min(20, rows // num_users)
    weights = np.exp(1.1 * normal(key, np.arange(num_users)))
    counts: I64 = np.clip((weights * rows / weights.sum()).astype(np.int64), least, most)
    while (left := rows - int(counts.sum())) != 0:
        open_users = np.flatnonzero(counts < most if left > 0 else counts > least)
        share = max(1, abs(left) // len(open_users))
        chosen = open_users[: abs(left) // share]
        counts[chosen] = np.clip(counts[chosen] + (share if left > 0 else -share), least, most)
    return counts


def _movie_ids(key: int, num_movies: int) -> I64:
    """Increasing ids with gaps, as in MovieLens."""
    num_ids = min(MAX_MOVIE_ID, round(num_movies * MAX_MOVIE_ID / MAX_MOVIES))
    kept = np.argsort(bits(key, np.arange(num_ids)), kind="stable")[:num_movies]
    return np.sort(kept) + 1


def _genres(key: int, movies: I64) -> Bools:
    """One to three genres a movie, the first ones of the list most often."""
    has = np.zeros((len(movies), len(GENRES)), dtype=np.bool_)
    num_wanted = 1 + choose(uniform(key, movies), [0.5, 0.35, 0.15])
    for turn in range(3):
        genre = zipf(uniform(key + turn + 1, movies), len(GENRES), 0.8)
        wanted = num_wanted > turn
        has[movies[wanted], genre[wanted]] = True
    return has


def _titles(key: int, num_movies: int) -> list[str]:
    movies = np.arange(num_movies)
    first, second, ending = (
        (len(words) * uniform(key + turn, movies)).astype(np.int64)
        for turn, words in enumerate((FIRST_WORDS, SECOND_WORDS, ENDINGS))
    )
    years = 2000 - zipf(uniform(key + 3, movies), 80, 0.6)
    return [
        f"{FIRST_WORDS[a]} {SECOND_WORDS[b]}{ENDINGS[c]} ({year})"
        for a, b, c, year in zip(first, second, ending, years, strict=True)
    ]


def _last_ranks(appeal: F64, order: I64, counts: I64) -> I64:
    """The rank of each user's last rated movie among those not rated before, by appeal."""
    users = np.arange(len(counts))
    target = order[users, counts - 1]
    seen = np.zeros(appeal.shape, dtype=np.bool_)
    rows, ranks = np.nonzero(np.arange(appeal.shape[1]) < counts[:, None] - 1)
    seen[rows, order[rows, ranks]] = True
    return ranks_of_targets(appeal, target, seen)
