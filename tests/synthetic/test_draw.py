"""The draws and the scores under every shape."""

from __future__ import annotations

import numpy as np
import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st

from recmill.synthetic.draw import choose, hex8, hex32, key_of, normal, pair, shuffled, uniform, zipf
from recmill.synthetic.draw import zipf_weights as weights_of_zipf
from recmill.synthetic.truth import BestScores, calibrate, ranks_of_targets, recall

INDEX = np.arange(200_000)


def test_draws_depend_on_seed_and_name_and_index_only():
    whole = uniform(key_of(1, "click"), INDEX)
    assert np.array_equal(whole[5_000:6_000], uniform(key_of(1, "click"), INDEX[5_000:6_000]))
    assert not np.array_equal(whole, uniform(key_of(2, "click"), INDEX))
    assert not np.array_equal(whole, uniform(key_of(1, "label"), INDEX))


def test_uniform_and_normal_have_their_moments():
    flat, bell = uniform(key_of(0, "u"), INDEX), normal(key_of(0, "n"), INDEX)
    assert flat.min() >= 0
    assert flat.max() < 1
    assert flat.mean() == pytest.approx(0.5, abs=0.005)
    assert bell.mean() == pytest.approx(0, abs=0.01)
    assert bell.std() == pytest.approx(1, abs=0.01)
    assert abs(np.corrcoef(flat, bell)[0, 1]) < 0.01
    assert abs(np.corrcoef(flat[1:], flat[:-1])[0, 1]) < 0.01


@pytest.mark.parametrize("exponent", [0.7, 1.0, 1.17])
def test_zipf_draws_as_its_weights_say(exponent):
    counts = np.bincount(zipf(uniform(key_of(3, "z"), INDEX), 50, exponent), minlength=50) / len(INDEX)
    assert len(counts) == 50
    assert np.abs(counts - weights_of_zipf(50, exponent)).max() < 0.005


@given(st.floats(0, 1, exclude_max=True), st.integers(1, 10**9), st.sampled_from([0.5, 1.0, 1.17]))
@examples(60)
def test_zipf_stays_in_range(draw, count, exponent):
    rank = zipf(np.array([draw]), count, exponent)[0]
    assert 0 <= rank < count


def test_choose_follows_the_weights():
    assert choose(np.array([0.0, 0.29, 0.31, 0.99]), [3, 0, 7]).tolist() == [0, 0, 2, 2]


def test_shuffled_is_a_permutation():
    assert sorted(shuffled(9, 100).tolist()) == list(range(100))
    assert shuffled(9, 100).tolist() != shuffled(10, 100).tolist()


def test_pairs_are_told_apart():
    assert pair(np.array([1, 2]), np.array([2, 1])).tolist() == [(1 << 32) + 2, (2 << 32) + 1]


def test_hex_is_written_as_logs_write_it():
    values = np.array([0, 0x68FD1E64, 0xFFFFFFFF], dtype=np.uint32)
    assert hex8(values, None).to_list() == ["00000000", "68fd1e64", "ffffffff"]
    assert hex8(values, np.array([True, False, True])).to_list() == ["00000000", "", "ffffffff"]
    long = hex32(5, np.arange(1_000))
    assert long.str.contains("^[0-9A-F]{32}$").all()
    assert long.n_unique() == 1_000


def scores_of(logits: list[float], labels: list[int]) -> BestScores:
    scores = BestScores()
    scores.add(np.array(logits, dtype=np.float64), np.array(labels, dtype=np.bool_))
    return scores


def test_auc_counts_pairs_and_halves_ties():
    assert scores_of([0, 1, 2, 3], [0, 0, 1, 1]).auc() == 1.0
    assert scores_of([3, 2, 1, 0], [0, 0, 1, 1]).auc() == 0.0
    assert scores_of([0, 1, 1, 2], [0, 0, 1, 1]).auc() == 0.875


def test_a_constant_scorer_gets_one_half():
    labels = (uniform(7, INDEX) < 0.3).astype(int).tolist()
    assert scores_of([0.4] * len(labels), labels).auc() == 0.5


def test_one_sided_labels_have_no_auc():
    assert scores_of([0, 1], [1, 1]).best() == {}
    assert scores_of([], []).best() == {}


def test_logloss_of_even_odds_is_log_two():
    assert scores_of([0, 0], [0, 1]).best() == {"auc": 0.5, "logloss": round(float(np.log(2)), 6)}


def test_scores_add_up_over_chunks():
    logits, labels = normal(1, INDEX), uniform(2, INDEX) < 0.5
    whole, parts = BestScores(), BestScores()
    whole.add(logits, labels)
    for part in range(4):
        parts.add(logits[part::4], labels[part::4])
    assert whole.best() == parts.best()


def test_calibrate_meets_rate_and_spread():
    raw = 5 + 0.3 * normal(1, INDEX)
    scale, bias = calibrate(raw, 0.256, 1.3)
    fitted = raw * scale + bias
    assert fitted.std() == pytest.approx(1.3, abs=1e-4)
    assert np.mean(1 / (1 + np.exp(-fitted))) == pytest.approx(0.256, abs=1e-4)


def test_ranks_skip_what_was_seen():
    scores = np.array([[5.0, 4.0, 3.0, 2.0]])
    seen = np.array([[True, False, False, False]])
    assert ranks_of_targets(scores, np.array([2]), seen).tolist() == [1]
    assert recall(np.array([1, 12]), (10, 50)) == {"recall@10": 0.5, "recall@50": 1.0}
    assert recall(np.zeros(0, dtype=np.int64), (10,)) == {}
