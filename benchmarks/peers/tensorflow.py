"""TensorFlow as fast as we could make it: one graph for the whole step, oneDNN, sparse updates by its fused kernels.

Measured slower and left out: XLA (`jit_compile`) for the dense part (it refuses the sparse updates), and Keras's own
optimizers (their Adagrad reads the whole table in each step). A table for each feature was not faster.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from itertools import cycle, pairwise
from typing import Any

from recmill.stages.bench.race import Task, main, memory_batches

NO_ACCUMULATOR = 1e-10  # TensorFlow's Adagrad cannot begin at 0, as the others do


def losses(task: Task) -> Iterator[float]:
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(task.threads)
    tf.config.threading.set_inter_op_parallelism_threads(task.threads)
    tf.random.set_seed(0)
    step = _step(tf, task)
    batches = [
        tuple(map(tf.constant, (batch.numbers, batch.ids + task.offsets[:-1], batch.labels)))
        for batch in memory_batches(task)
    ]
    for numbers, ids, labels in cycle(batches):
        yield float(step(numbers, ids, labels))


def _step(tf: Any, task: Task) -> Callable[..., Any]:
    """One step of training as one graph: numbers, ids and labels to the loss."""
    mlps = [KerasMLP(tf, widths) for widths in task.layers()]
    dense = [weights for mlp in mlps for weights in mlp.weights]
    deep = tf.Variable(tf.concat([_rows(tf, size, task.embedding_dim) for size in task.sizes], axis=0))
    wide = tf.Variable(tf.zeros([sum(task.sizes), 1])) if task.shape == "wide_deep" else None
    tables = [deep] if wide is None else [deep, wide]
    of_dense, *of_tables = _optimizers(tf, task)

    def logits(numbers: Any, ids: Any) -> Any:
        embedded = tf.reshape(tf.gather(deep, ids), [task.batch_size, -1])
        if wide is None:
            below = tf.nn.relu(mlps[0](numbers))
            return mlps[1](tf.concat([below, embedded], axis=1))
        return mlps[0](tf.concat([numbers, embedded], axis=1)) + tf.reduce_sum(tf.gather(wide, ids), axis=1)

    @tf.function  # type: ignore[untyped-decorator, unused-ignore]
    def step(numbers: Any, ids: Any, labels: Any) -> Any:
        with tf.GradientTape() as tape:
            scores = tf.squeeze(logits(numbers, ids), axis=1)
            loss = tf.reduce_mean(tf.nn.sigmoid_cross_entropy_with_logits(labels, scores))
        gradients = tape.gradient(loss, [*dense, *tables])
        of_dense.apply_gradients(zip(gradients[: len(dense)], dense, strict=True))
        for optimizer, gradient, table in zip(of_tables, gradients[len(dense) :], tables, strict=True):
            optimizer.apply_gradients([(gradient, table)])
        return loss

    return step  # type: ignore[no-any-return, unused-ignore]


def _optimizers(tf: Any, task: Task) -> list[Any]:
    """Of the dense weights, of the tables, and FTRL of the wide part."""
    train = tf.compat.v1.train
    tables = train.AdagradOptimizer(task.sparse_rate, NO_ACCUMULATOR)
    if task.shape == "dlrm":
        return [train.AdamOptimizer(task.dense_rate), tables]
    return [
        train.AdagradOptimizer(task.dense_rate, NO_ACCUMULATOR),
        tables,
        train.FtrlOptimizer(task.wide_rate),
    ]


class KerasMLP:
    """Dense layers with ReLU between them."""

    def __init__(self, tf: Any, widths: Sequence[int]) -> None:
        self.tf = tf
        self.layers = [
            (
                tf.Variable(tf.random.normal([width, after], stddev=(2.0 / (width + after)) ** 0.5)),
                tf.Variable(tf.random.normal([after], stddev=after**-0.5)),
            )
            for width, after in pairwise(widths)
        ]
        self.weights = [weights for layer in self.layers for weights in layer]

    def __call__(self, inputs: Any) -> Any:
        for index, (kernel, bias) in enumerate(self.layers):
            inputs = self.tf.nn.relu(inputs) if index else inputs
            inputs = self.tf.nn.bias_add(self.tf.matmul(inputs, kernel), bias)
        return inputs


def _rows(tf: Any, size: int, dim: int) -> Any:
    return tf.random.uniform([size, dim], -(size**-0.5), size**-0.5)


def versions() -> dict[str, str]:
    import tensorflow as tf

    return {"tensorflow": tf.__version__}


if __name__ == "__main__":
    main(losses, versions)
