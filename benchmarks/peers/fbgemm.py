"""FBGEMM's CPU tables, which TorchRec trains with: row-wise Adagrad fused into the backward pass.

FBGEMM has no FTRL and no rows of dim 1. The wide part is torch's sparse bag: a fused table of dim 4 took twice as long.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import cycle
from typing import Any

from recmill.stages.bench.race import Task, main, memory_batches


def losses(task: Task) -> Iterator[float]:
    import fbgemm_gpu  # noqa: F401, first: without it there is no need to wait for torch
    import torch

    from benchmarks.peers.torch_parts import WideBag, allow_sparse, dense_model, dense_optimizer, step

    torch.set_num_threads(task.threads)
    torch.manual_seed(0)
    allow_sparse()
    model = dense_model(task)
    optimizers = [dense_optimizer(task, model)]
    deep = _tables(task.sizes, task.embedding_dim, task.sparse_rate)
    deep.init_embedding_weights_uniform(-1.0, 1.0)
    for size, rows in zip(task.sizes, deep.split_embedding_weights(), strict=True):
        rows.mul_(size**-0.5)
    wide = WideBag(task) if task.shape == "wide_deep" else None
    if wide is not None:
        optimizers.append(wide.optimizer)
    each = torch.arange(len(task.sizes) * task.batch_size + 1)
    batches = [
        (
            torch.from_numpy(batch.numbers),
            torch.from_numpy(batch.ids.T.reshape(-1)),  # feature after feature, as the tables want them
            torch.from_numpy(batch.ids + task.offsets[:-1]),
            torch.from_numpy(batch.labels),
        )
        for batch in memory_batches(task)
    ]
    for numbers, ids, wide_ids, labels in cycle(batches):
        inputs = [numbers, deep(ids, each)]
        if wide is not None:
            inputs.append(wide.bag(wide_ids))
        yield step(model, inputs, labels, optimizers)


def _tables(sizes: Sequence[int], dim: int, rate: float) -> Any:
    import torch
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
        BoundsCheckMode,
        ComputeDevice,
        EmbeddingLocation,
        SplitTableBatchedEmbeddingBagsCodegen,
    )

    return SplitTableBatchedEmbeddingBagsCodegen(
        [(size, dim, EmbeddingLocation.HOST, ComputeDevice.CPU) for size in sizes],
        optimizer=EmbOptimType.EXACT_ROWWISE_ADAGRAD,
        learning_rate=rate,
        bounds_check_mode=BoundsCheckMode.NONE,
        device=torch.device("cpu"),
    )


def versions() -> dict[str, str]:
    import fbgemm_gpu
    import torch

    return {"torch": torch.__version__, "fbgemm-gpu-cpu": fbgemm_gpu.__version__}


if __name__ == "__main__":
    main(losses, versions)
