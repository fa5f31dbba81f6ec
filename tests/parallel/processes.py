"""Real workers: processes that meet over loopback, each calls the same function."""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from forked import fork_context
from ports import free_port

SECONDS = 120.0


def together(folder: Path, size: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """What function(workers, *arguments) gives on each of `size` workers. An error is a text; who died says None."""
    folder.mkdir(parents=True, exist_ok=True)
    address = f"127.0.0.1:{free_port()}"
    context = fork_context()
    answers = [folder / f"answer-{rank}" for rank in range(size)]
    workers = [
        context.Process(target=_work, args=(rank, size, address, answers[rank], function, arguments))
        for rank in range(size)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(SECONDS)
        if worker.is_alive():
            worker.kill()
            worker.join()
    return [pickle.loads(answer.read_bytes()) if answer.exists() else None for answer in answers]


def _work(
    rank: int, size: int, address: str, answer: Path, function: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    import torch

    from recmill.distributed.workers import connect

    torch.set_num_threads(1)
    workers = connect(rank, size, address, timeout_minutes=1.0)
    try:
        found = function(workers, *arguments)
    except Exception:
        found = traceback.format_exc()
    answer.write_bytes(pickle.dumps(found))
    workers.close()
