"""A bundle to load a server with, made from a generated log by prepare, train and export."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

from recmill.artifacts.manifest import write_whole
from recmill.recipe.load import load_recipe
from recmill.stages.bench.serve.log import LABELS, LogSize, write_log
from recmill.stages.export.config import ExportConfig

RowsDtype = Literal["float32", "float16", "int8"]
Products = Literal["float32", "int8"]
RECIPE = Path(__file__).parent / "bench-serve.toml"
_SECONDS_FILE = "seconds.json"


def make_bundle(
    items: int,
    into: Path,
    rows_dtype: RowsDtype = "float32",
    products: Products = "float32",
    report: Callable[[str], None] = lambda line: None,
) -> Path:
    """A bundle of DeepRec's DLRM and two towers over so many items; a second call uses it again.

    `seconds.json` has the time of each stage; `log/` has `labels.parquet` and `context.parquet` for requests.
    """
    folder = into / f"dlrm-deeprec-{items}"
    options = ExportConfig(rows=rows_dtype, products=products)
    bundle = folder / f"bundle-{rows_dtype}{'-products-int8' if products == 'int8' else ''}"
    if not (bundle / "current").is_file():
        _make(folder, bundle, LogSize.of(items), options, report)
    return bundle


def _make(
    folder: Path, bundle: Path, size: LogSize, options: ExportConfig, report: Callable[[str], None]
) -> None:
    from recmill.artifacts.checkpoint.checkpoint import Checkpoint
    from recmill.dataset.table import Table
    from recmill.stages.export.export import export
    from recmill.stages.prepare.prepare import prepare
    from recmill.stages.train.config import TrainConfig
    from recmill.stages.train.source import TableData
    from recmill.stages.train.train import train

    recipe, log = load_recipe(str(RECIPE)), folder / "log"
    stages: Mapping[str, Callable[[], Any]] = {
        "log": lambda: None if (log / LABELS).is_file() else write_log(size, log),
        "prepare": lambda: prepare(recipe, str(log), folder / "table"),
        "train": lambda: train(
            recipe,
            TableData(Table.open(folder / "table")),
            folder / "checkpoint",
            TrainConfig(resume=True),
        ),
        f"export {bundle.name.removeprefix('bundle-')}": lambda: export(
            Checkpoint.open(folder / "checkpoint"),
            str(log),
            bundle,
            options,
        ),
    }
    seconds = {}
    for name, work in stages.items():
        started = time.perf_counter()
        work()
        seconds[name] = round(time.perf_counter() - started, 1)
        report(f"{name:<16} {seconds[name]:,.1f} s")
    _update_seconds(folder / _SECONDS_FILE, seconds)


def _update_seconds(path: Path, seconds: dict[str, float]) -> None:
    """A stage that was done before takes no time now: keep the longest time of each."""
    before = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    longest = {name: max(value, before.get(name, 0.0)) for name, value in seconds.items()}
    write_whole(path, json.dumps({**before, **longest}) + "\n")
