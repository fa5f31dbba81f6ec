"""Twitter's RecSys 2021 challenge: who saw which tweet, and who liked, replied, retweeted or quoted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import ceil
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl
import pyarrow as pa

from recmill.errors import RecmillError
from recmill.synthetic import files
from recmill.synthetic.draw import (
    F64,
    I64,
    Bools,
    bits,
    choose,
    hex32,
    key_of,
    normal,
    pair,
    sigmoid,
    uniform,
    zipf,
)
from recmill.synthetic.files import GenerateJob, PartialFiles
from recmill.synthetic.truth import PILOT_ROWS, BestScores, calibrate

NAME = "recsys2021"
DESCRIPTION = "Twitter engagements: 24 columns, part-NNNNN.csv separated by \\x01 without header, or Parquet"
OPTIONS: dict[str, Any] = {"format": "csv", "compress": False}

# fmt: off
COLUMNS = (
    "text_tokens", "hashtags", "tweet_id", "present_media", "present_links", "present_domains", "tweet_type",
    "language", "tweet_timestamp", "engaged_with_user_id", "engaged_with_user_follower_count",
    "engaged_with_user_following_count", "engaged_with_user_is_verified",
    "engaged_with_user_account_creation", "engaging_user_id", "engaging_user_follower_count",
    "engaging_user_following_count",
    "engaging_user_is_verified", "engaging_user_account_creation", "engagee_follows_engager",
    "reply_timestamp", "retweet_timestamp", "retweet_with_comment_timestamp", "like_timestamp",
)
# fmt: on

PART_ROWS = 1 << 20
FIRST_SECOND, NUM_SECONDS = 1_612_396_800, 28 * 86_400  # 4 February 2021, 28 days
ROWS_PER_USER = 20
# Tweets appear in blocks: 3,072 rows show 1,024 tweets, a few of them often, most of them once or never.
BLOCK_ROWS, BLOCK_TWEETS = 3_072, 1_024
NUM_LANGUAGES, NUM_TOPICS, NUM_SEGMENTS = 66, 40, 8
TYPES, TYPE_WEIGHTS = ("TopLevel", "Retweet", "Quote"), (0.55, 0.36, 0.09)
MEDIA, MEDIA_WEIGHTS = ("Photo", "Video", "GIF"), (0.7, 0.2, 0.1)
TAGS_PER_TOPIC, DOMAINS_PER_TOPIC = 40, 15
TOPIC_TOKENS, FIRST_TOPIC_TOKEN, NUM_TOKENS = 200, 2_000, 30_522

# For each engagement: overall rate, standard deviation of logits, effects of a follow and of media.
ENGAGEMENTS = {
    "like": (0.45, 1.35, 0.3, 0.5),
    "reply": (0.1, 1.2, 0.9, 0.0),
    "retweet": (0.08, 1.25, 0.2, 0.3),
    "retweet_with_comment": (0.015, 1.2, 0.4, 0.0),
}


Write = Callable[[pl.DataFrame], None]


def check(job: GenerateJob) -> None:
    if job.options["format"] not in ("csv", "parquet"):
        raise RecmillError(f'format must be "csv" or "parquet", got {job.options["format"]!r}.')
    if job.options["format"] == "parquet" and job.options["compress"]:
        raise RecmillError("Parquet is already compressed; leave out compress, or use the csv format.")


def write(job: GenerateJob, output: PartialFiles) -> tuple[dict[str, float], str]:
    """Write parts of about a million rows, in the order of tweet time."""
    # A part ends where a block ends, so that no tweet is in two parts.
    part_rows = PART_ROWS - PART_ROWS % BLOCK_ROWS
    parts = [
        (_part_name(job, number), first, last)
        for number, (first, last) in enumerate(files.chunks(0, job.rows, part_rows))
    ]
    output.claim([name for name, _, _ in parts])
    truth = TwitterTruth(job.seed, job.rows)
    scores = {name: BestScores() for name in ("", *ENGAGEMENTS)}
    for name, start, stop in parts:
        with _part_writer(job, output, name) as write_frame:
            _write_part(job, truth, write_frame, (start, stop), scores)
    best = scores[""].best()
    for engagement in ENGAGEMENTS:
        best |= scores[engagement].best(f"_{engagement}")
    return best, _note()


def _write_part(
    job: GenerateJob, truth: TwitterTruth, write: Write, rows: tuple[int, int], scores: dict[str, BestScores]
) -> None:
    chunk_rows = ceil(files.CHUNK_ROWS / BLOCK_ROWS) * BLOCK_ROWS
    first_held_out = job.rows - ceil(job.rows / 10)
    for first, last in files.chunks(*rows, chunk_rows):
        frame, logits, labels = truth.rows(first, last)
        write(frame)
        held_out = slice(max(first_held_out - first, 0), None)
        for name, best in scores.items():
            best.add(logits[name][held_out], labels[name][held_out])
        job.progress(last)


def _part_name(job: GenerateJob, number: int) -> str:
    suffix = ".gz" if job.options["compress"] else ""
    return f"part-{number:05d}.{job.options['format']}{suffix}"


@contextmanager
def _part_writer(job: GenerateJob, output: PartialFiles, name: str) -> Iterator[Write]:
    if job.options["format"] == "parquet":
        with files.parquet_writer(output.path(name)) as write:
            yield write
    else:
        with output.open(name) as file:
            yield lambda frame: files.write_rows(file, frame, "\x01")


def _note() -> str:
    return (
        "Engagements are drawn from how well the tweet's topic (shown by hashtags, domains, tokens and "
        "author) suits the user, from author, user activity, the follow, media, type and language match. "
        "best scores the true probabilities over the last tenth of the rows: auc and logloss for any "
        "engagement, auc_like and so on for each. Held-out tweets are new, as in the challenge."
    )


class TwitterTruth:
    """Users, tweets and the effects behind engagements; every attribute is a function of (seed, id)."""

    def __init__(self, seed: int, num_rows: int) -> None:
        self.seed = seed
        self.num_users = max(50, num_rows // ROWS_PER_USER)
        self.num_seconds_per_tweet = NUM_SECONDS / (ceil(num_rows / BLOCK_ROWS) * BLOCK_TWEETS)
        pilot = np.arange(PILOT_ROWS)
        tweets = bits(self._key("pilot"), pilot).astype(np.int64) & 0xFFFFFF
        users, follows = self._audience(pilot, tweets)
        interest = self._interest(tweets, users)
        self.fits = {
            name: calibrate(self._raw_logits(name, interest, follows, tweets), rate, spread)
            for name, (rate, spread, _, _) in ENGAGEMENTS.items()
        }

    def rows(self, first: int, last: int) -> tuple[pl.DataFrame, dict[str, F64], dict[str, Bools]]:
        """Columns, true logits and drawn labels of a run of whole blocks; "" is any engagement."""
        index = np.arange(first, last)
        tweets = self._tweets_shown(index)
        users, follows = self._audience(index, tweets)
        logits, labels = self._engagements(index, tweets, users, follows)
        distinct, where = np.unique(tweets, return_inverse=True)
        frame = self._tweet_columns(distinct)[where]
        seconds = frame["tweet_timestamp"].to_numpy()
        frame = frame.with_columns(
            *self._user_columns("engaging_user", users),
            pl.Series("engagee_follows_engager", follows),
            *(self._engagement_time(name, index, seconds, labels[name]) for name in ENGAGEMENTS),
        )
        return frame.select(COLUMNS), logits, labels

    def _key(self, *names: object) -> int:
        return key_of(self.seed, NAME, *names)

    def _tweets_shown(self, index: I64) -> I64:
        """The tweet of each row, never decreasing: rows are in the order of tweet time."""
        block = index // BLOCK_ROWS
        rank = zipf(uniform(self._key("tweet shown"), index), BLOCK_TWEETS, 0.6)
        # An odd factor and a shift put the popular tweets of a block anywhere in it.
        slot = (
            rank * 389 + (bits(self._key("block"), block) & np.uint64(1023)).astype(np.int64)
        ) % BLOCK_TWEETS
        return np.sort(block * BLOCK_TWEETS + slot)

    def _audience(self, index: I64, tweets: I64) -> tuple[I64, Bools]:
        """(user, whether the author follows this user) of each row; most users read the tweet's language."""
        first, second = (self._user_drawn(turn, index) for turn in ("first", "second"))
        suits = self._language_of_user(first) == self._language_of_tweet(tweets)
        users = np.where(suits, first, second)
        fame = np.log((self.num_users + 1.0) / (self._author(tweets) + 1.0))
        follows = uniform(self._key("follows"), index) < 0.45 * np.exp(-0.15 * fame) + 0.25 * suits
        return users, follows

    def _user_drawn(self, turn: str, index: I64) -> I64:
        rank = zipf(uniform(self._key("user", turn), index), self.num_users, 0.5)
        # Authors are numbered by fame; a factor prime to the count makes fame and activity unrelated.
        return (rank * 2_654_435_761 + 12_345) % self.num_users

    def _author(self, tweets: I64) -> I64:
        return zipf(uniform(self._key("author"), tweets), self.num_users, 0.8)

    def _language_of_user(self, users: I64) -> I64:
        return zipf(uniform(self._key("user language"), users), NUM_LANGUAGES, 1.3)

    def _language_of_tweet(self, tweets: I64) -> I64:
        foreign = uniform(self._key("foreign"), tweets) < 0.08
        other = zipf(uniform(self._key("tweet language"), tweets), NUM_LANGUAGES, 1.3)
        return np.where(foreign, other, self._language_of_user(self._author(tweets)))

    def _topic(self, tweets: I64) -> I64:
        """Authors keep to one topic most of the time."""
        usual = zipf(uniform(self._key("author topic"), self._author(tweets)), NUM_TOPICS, 0.7)
        other = zipf(uniform(self._key("tweet topic"), tweets), NUM_TOPICS, 0.7)
        return np.where(uniform(self._key("strays"), tweets) < 0.15, other, usual)

    def _created_at(self, users: I64) -> I64:
        return (1_150_000_000 + 460_000_000 * uniform(self._key("created"), users)).astype(np.int64)

    def _segment(self, users: I64) -> I64:
        """Users of a segment share tastes; mostly it follows from when the account was created."""
        era = (self._created_at(users) - 1_150_000_000) * NUM_SEGMENTS // 460_000_000
        other = (uniform(self._key("segment"), users) * NUM_SEGMENTS).astype(np.int64)
        return np.where(uniform(self._key("odd one"), users) < 0.2, other, era)

    def _interest(self, tweets: I64, users: I64) -> F64:
        """How well tweet and user match, without the effects of the follow and the media."""
        author, topic = self._author(tweets), self._topic(tweets)
        same_language = self._language_of_user(users) == self._language_of_tweet(tweets)
        fame = np.log((self.num_users + 1.0) / (author + 1.0))
        interest: F64 = 0.9 * normal(self._key("taste"), pair(self._segment(users), topic))
        interest += 0.3 * normal(self._key("own taste"), pair(users, topic))
        interest += 0.6 * normal(self._key("topic"), topic) + 0.6 * normal(self._key("author effect"), author)
        interest += 0.5 * normal(self._key("activity"), users) + 0.12 * fame + 0.5 * same_language
        interest += np.asarray([0.3, -0.2, 0.0])[self._type(tweets)]
        return interest

    def _raw_logits(self, name: str, interest: F64, follows: Bools, tweets: I64) -> F64:
        _, _, follow_pull, media_pull = ENGAGEMENTS[name]
        kind_taste = normal(self._key("kind", name), self._topic(tweets))
        has_media = self._num_media(tweets) > 0
        logits: F64 = interest + follow_pull * follows + media_pull * has_media + 0.3 * kind_taste
        return logits

    def _engagements(
        self, index: I64, tweets: I64, users: I64, follows: Bools
    ) -> tuple[dict[str, F64], dict[str, Bools]]:
        interest = self._interest(tweets, users)
        logits: dict[str, F64] = {}
        labels: dict[str, Bools] = {"": np.zeros(len(index), dtype=np.bool_)}
        none_at_all = np.ones(len(index))
        for name, (scale, bias) in self.fits.items():
            logits[name] = self._raw_logits(name, interest, follows, tweets) * scale + bias
            probability = sigmoid(logits[name])
            labels[name] = uniform(self._key("engages", name), index) < probability
            labels[""] |= labels[name]
            none_at_all *= 1.0 - probability
        logits[""] = np.log1p(-none_at_all) - np.log(none_at_all)
        return logits, labels

    def _engagement_time(self, name: str, index: I64, seconds: I64, happened: Bools) -> pl.Series:
        delay = np.exp(7.0 + 1.5 * normal(self._key("delay", name), index)).astype(np.int64) + 1
        moments = np.minimum(seconds + delay, FIRST_SECOND + NUM_SECONDS)
        return pl.Series(f"{name}_timestamp", pa.array(moments, mask=~happened))

    def _tweet_columns(self, tweets: I64) -> pl.DataFrame:
        author, topic = self._author(tweets), self._topic(tweets)
        num_domains = choose(uniform(self._key("num domains"), tweets), [0.72, 0.25, 0.03])
        offset = uniform(self._key("second"), tweets)
        seconds = FIRST_SECOND + ((tweets + offset) * self.num_seconds_per_tweet).astype(np.int64)
        return pl.DataFrame(
            [
                self._text(tweets, topic),
                self._tokens_of_topic("hashtags", tweets, topic, self._num_hashtags(tweets), TAGS_PER_TOPIC),
                hex32(self._key("tweet id"), tweets).alias("tweet_id"),
                self._media(tweets),
                _joined("present_links", num_domains, lambda row, at: self._link(tweets[row], at)),
                self._tokens_of_topic("present_domains", tweets, topic, num_domains, DOMAINS_PER_TOPIC),
                pl.Series("tweet_type", TYPES).gather(self._type(tweets)),
                hex32(self._key("language"), self._language_of_tweet(tweets)).alias("language"),
                pl.Series("tweet_timestamp", seconds),
                *self._user_columns("engaged_with_user", author),
            ]
        )

    def _type(self, tweets: I64) -> I64:
        return choose(uniform(self._key("type"), tweets), TYPE_WEIGHTS)

    def _num_hashtags(self, tweets: I64) -> I64:
        return choose(uniform(self._key("num hashtags"), tweets), [0.45, 0.3, 0.15, 0.1])

    def _num_media(self, tweets: I64) -> I64:
        return choose(uniform(self._key("num media"), tweets), [0.55, 0.35, 0.06, 0.02, 0.02])

    def _media(self, tweets: I64) -> pl.Series:
        def names(row: I64, at: I64) -> pl.Series:
            draws = uniform(self._key("media"), pair(tweets[row], at))
            return pl.Series(MEDIA).gather(choose(draws, MEDIA_WEIGHTS))

        return _joined("present_media", self._num_media(tweets), names)

    def _link(self, tweets: I64, at: I64) -> pl.Series:
        return hex32(self._key("link"), pair(tweets, at))

    def _tokens_of_topic(self, name: str, tweets: I64, topic: I64, counts: I64, num_each: int) -> pl.Series:
        def ids(row: I64, at: I64) -> pl.Series:
            rank = zipf(uniform(self._key(name), pair(tweets[row], at)), num_each, 1.0)
            return hex32(self._key(name, "id"), topic[row] * num_each + rank)

        return _joined(name, counts, ids)

    def _text(self, tweets: I64, topic: I64) -> pl.Series:
        """BERT token ids between [CLS] 101 and [SEP] 102; a third of them belong to the topic."""
        counts = 8 + zipf(uniform(self._key("num tokens"), tweets), 60, 0.4)

        def tokens(row: I64, at: I64) -> pl.Series:
            where = pair(tweets[row], at)
            draws = uniform(self._key("token"), where)
            common = 1_000 + zipf(draws, NUM_TOKENS - 1_000, 1.0)
            special = FIRST_TOPIC_TOKEN + topic[row] * TOPIC_TOKENS + zipf(draws, TOPIC_TOKENS, 0.8)
            ids = np.where(uniform(self._key("on topic"), where) < 0.33, special, common)
            ids = np.where(at == 0, 101, np.where(at == counts[row] - 1, 102, ids))
            return _TOKEN_TEXT.gather(ids)

        return _joined("text_tokens", counts, tokens)

    def _user_columns(self, role: str, users: I64) -> list[pl.Series]:
        fame = np.log((self.num_users + 1.0) / (users + 1.0))
        followers = np.exp(4.0 + fame + 1.1 * normal(self._key("followers"), users))
        following = np.exp(
            5.2 + 0.5 * normal(self._key("activity"), users) + normal(self._key("following"), users)
        )
        verified = uniform(self._key("verified"), users) < sigmoid(np.log(followers) - 11.0)
        return [
            hex32(self._key("user id"), users).alias(f"{role}_id"),
            pl.Series(f"{role}_follower_count", followers.astype(np.int64)),
            pl.Series(f"{role}_following_count", following.astype(np.int64)),
            pl.Series(f"{role}_is_verified", verified),
            pl.Series(f"{role}_account_creation", self._created_at(users)),
        ]


_TOKEN_TEXT = pl.Series([str(token) for token in range(NUM_TOKENS)])


def _joined(name: str, counts: I64, make: Callable[[I64, I64], pl.Series]) -> pl.Series:
    """Tab-separated tokens, `counts` of them a row; null where there are none.

    `make(row, at)` gives the token at each position `at` of each `row`.
    """
    ends = np.cumsum(counts)
    row: I64 = np.repeat(np.arange(len(counts)), counts)
    at: I64 = np.arange(len(row)) - np.repeat(ends - counts, counts)
    offsets: npt.NDArray[np.int64] = np.concatenate([[0], ends])
    lists = pa.LargeListArray.from_arrays(pa.array(offsets), make(row, at).to_arrow())
    frame = pl.DataFrame({name: pl.Series(values=lists)})
    joined = pl.when(pl.col(name).list.len() > 0).then(pl.col(name).list.join("\t"))
    return frame.select(joined.alias(name)).to_series()
