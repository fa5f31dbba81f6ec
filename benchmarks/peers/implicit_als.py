"""ALS of `implicit`, tuned a little: lists of items for held-out users of one log.

python benchmarks/peers/implicit_als.py ROWS LISTS

ROWS is an .npz of `benchmarks/first_hour.py`. Penalty and confidence are chosen by recall on users of eval, with the
model fitted to rows of train; the lists are of a model fitted to rows of train and eval. -1 stands where there is
nothing to recommend.
"""

from __future__ import annotations

import itertools
import json
import sys
import time
from typing import Any

import implicit.cpu.als
import numpy as np
import scipy.sparse

K = 10
FACTORS, ITERATIONS = 64, 15
PENALTIES, CONFIDENCES = (0.01, 0.1, 1.0), (1.0, 5.0, 20.0)

Array = np.ndarray[Any, np.dtype[Any]]


class Fit:
    """A model of who took what."""

    def __init__(self, pairs: Array, shape: tuple[int, int], penalty: float, confidence: float) -> None:
        ones = np.ones(len(pairs), np.float32)
        rows = scipy.sparse.csr_matrix((ones, (pairs[:, 0], pairs[:, 1])), shape)
        rows.data[:] = 1
        self.rows = rows
        self.model = implicit.cpu.als.AlternatingLeastSquares(
            factors=FACTORS,
            regularization=penalty,
            alpha=confidence,
            iterations=ITERATIONS,
            random_state=0,
            num_threads=2,
        )
        self.model.fit(rows, show_progress=False)

    def lists(self, users: Array) -> Array:
        """The best items that each user has not taken; -1 for users without rows."""
        found, _ = self.model.recommend(users, self.rows[users], N=K, filter_already_liked_items=True)
        found = np.asarray(found, np.int64)
        found[np.diff(self.rows.indptr)[users] == 0] = -1
        return np.asarray(found)


def mean_recall(lists: Array, held_out: scipy.sparse.csr_matrix, users: Array) -> float:
    each = [
        len(set(lists[number]) & set(held_out[user].indices)) / held_out[user].nnz
        for number, user in enumerate(users)
    ]
    return float(np.mean(each))


def main() -> None:
    rows = np.load(sys.argv[1])
    shape = (int(rows["num_users"]), int(rows["num_items"]))
    pairs, users = rows["eval"], rows["eval_users"]
    held_out = scipy.sparse.csr_matrix((np.ones(len(pairs)), (pairs[:, 0], pairs[:, 1])), shape)
    recalls = {
        setting: mean_recall(Fit(rows["train"], shape, *setting).lists(users), held_out, users)
        for setting in itertools.product(PENALTIES, CONFIDENCES)
    }
    penalty, confidence = max(recalls, key=lambda setting: recalls[setting])
    began = time.perf_counter()
    fit = Fit(np.concatenate([rows["train"], pairs]), shape, penalty, confidence)
    seconds = time.perf_counter() - began
    np.save(sys.argv[2], fit.lists(rows["test_users"]))
    print(json.dumps({"regularization": penalty, "alpha": confidence, "seconds": round(seconds, 1)}))


if __name__ == "__main__":
    main()
