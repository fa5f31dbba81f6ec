"""export: checkpoint + log -> Bundle. Everything that a server needs, in one folder that is published atomically."""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from recmill.artifacts.bundle.arrays import file_name
from recmill.artifacts.bundle.bundle import (
    Bundle,
    publish_bundle,
    set_current,
    side_layout,
)
from recmill.artifacts.bundle.layers import FILE, RANGES_FILE, TOWER_FILE
from recmill.artifacts.bundle.remote import bundles_written
from recmill.artifacts.bundle.row_files import write_rows
from recmill.artifacts.checkpoint.checkpoint import Checkpoint
from recmill.artifacts.checkpoint.step import StepCheckpoint
from recmill.errors import ArtifactError
from recmill.learner.graphs.graphs import write_graphs
from recmill.learner.graphs.layers import layers_of, tower_layers_of
from recmill.learner.ranking import Ranker
from recmill.learner.retrieval import Retriever
from recmill.learner.saved import open_learner
from recmill.logs.inputs import Inputs, open_inputs
from recmill.logs.tail import sizes_of
from recmill.recall.parameters import UNFITTED, RecallParameters
from recmill.recipe.kinds import parts_of_features
from recmill.recipe.load import recipe_to_dict
from recmill.recipe.trust import modules_of
from recmill.reporting.machine import available_cores
from recmill.reporting.progress import Progress
from recmill.stages.export import products
from recmill.stages.export.check import check_bundle
from recmill.stages.export.config import ExportConfig
from recmill.stages.export.sides import write_items, write_users, write_vectors
from recmill.stages.export.snapshot import SAMPLED_ROWS, EntitySnapshot, read_snapshot
from recmill.stages.export.versions import exporting, is_whole, keep_newest, written_aside
from recmill.storage.objects import is_url
from recmill.storage.view import address_of

EVALUATION = "evaluation.json"  # `recmill evaluate` writes it beside the checkpoints
RECALL = "recall.json"  # and what recall was fitted with
REPORT = "report.html"  # its report, in a bundle


@dataclass(frozen=True)
class ExportResult:
    """A published bundle, and what was read for it."""

    bundle: Bundle
    num_rows: int  # read from the log
    num_bad: int
    seconds: float
    was_complete: bool = False
    removed: tuple[str, ...] = ()  # older versions


def export(
    folder: Checkpoint,
    data: str,
    into: Path,
    options: ExportConfig = ExportConfig(),  # noqa: B008, frozen
    progress: Progress | None = None,
) -> ExportResult:
    """Publish a checkpoint's models with users and items as of the log's end. Killed, it starts over when run again."""
    started = time.monotonic()
    if not folder.models:
        raise ArtifactError(f"{folder.path} has no checkpoint yet. Run `recmill train` first.")
    chosen = choose(folder, options.which)
    _check_gate(folder, chosen, options)
    inputs = open_inputs(folder.recipe, data, may_grow=True)
    version = _version(folder, chosen, inputs, options)
    num_rows = num_bad = 0
    with exporting(into):
        was_complete = is_whole(into / version)
        if not was_complete:
            with written_aside(into, version) as aside:
                sampled = products.SAMPLED_ROWS if options.products == "int8" else SAMPLED_ROWS
                snapshot = read_snapshot(
                    folder.recipe,
                    folder.plan,
                    data,
                    aside / "work",
                    progress,
                    options.memory,
                    sampled_rows=sampled,
                )
                num_rows, num_bad = snapshot.num_rows, snapshot.num_bad
                inputs.check_unchanged()
                _write(aside, version, folder, chosen, snapshot, sizes_of(inputs.log), options)
        if options.publish:
            set_current(into, version)
        removed = keep_newest(into, options.keep) if options.keep is not None else []
    bundle = Bundle.open(into / version)
    return ExportResult(bundle, num_rows, num_bad, time.monotonic() - started, was_complete, tuple(removed))


def export_at(
    folder: Checkpoint,
    data: str,
    address: str | Path,
    options: ExportConfig = ExportConfig(),  # noqa: B008, frozen
    progress: Progress | None = None,
) -> ExportResult:
    """The same for an address that may be a URL: the version is made in a local folder, and then published."""
    if not is_url(address):
        return export(folder, data, Path(address), options, progress)
    with bundles_written(str(address)) as bundles:
        exported = export(folder, data, bundles.path, replace(options, keep=None), progress)
        removed = bundles.push_version(exported.bundle.version, options.keep)
    return replace(exported, removed=tuple(removed))


def choose(folder: Checkpoint, which: str) -> dict[str, StepCheckpoint]:
    """The best or last checkpoint of each model, or that of a step; a model without that step gives its best."""
    steps = {model: [str(known.step) for known in folder.of(model).all()] for model in folder.models}
    is_step = any(which in known for known in steps.values())
    return {
        model: folder.of(model).find("best" if is_step and which not in known else which)
        for model, known in steps.items()
    }


def _write(
    aside: Path,
    version: str,
    folder: Checkpoint,
    chosen: Mapping[str, StepCheckpoint],
    snapshot: EntitySnapshot,
    log_sizes: Mapping[str, int],
    options: ExportConfig,
) -> None:
    """All files of a bundle, checked, and then the manifest that makes it one."""
    learners = open_learners(folder, chosen, options)
    models = write_models(aside, folder, learners, options)
    recall = read_recall(folder, chosen) or UNFITTED
    write_sides(aside, folder, models, learners.get("retrieval"), snapshot, recall, options)
    _copy_report(folder, chosen, aside)
    shutil.rmtree(aside / "work", ignore_errors=True)
    manifest = {
        **describe_bundle(aside, version, folder, models, snapshot, recall, options),
        **_facts(folder, chosen, log_sizes),
    }
    bundle = Bundle(aside, manifest, modules_of(folder.recipe))
    checked = check_bundle(bundle, learners, folder.plan, snapshot.sample)
    if options.products == "int8":
        ranges, checked["products"] = products.fit_byte_products(bundle, snapshot.sample)
        (aside / "graphs" / RANGES_FILE).write_bytes(ranges.to_bytes())
    publish_bundle(aside, {**manifest, "check": checked})


# The parts that bundles as of an earlier time are made of too.


def open_learners(
    folder: Checkpoint, chosen: Mapping[str, StepCheckpoint], options: ExportConfig
) -> dict[str, Ranker | Retriever]:
    threads = options.threads or available_cores()
    return {
        model: open_learner(folder, model, str(checkpoint.step), threads).learner
        for model, checkpoint in chosen.items()
    }


def write_models(
    aside: Path, folder: Checkpoint, learners: Mapping[str, Ranker | Retriever], options: ExportConfig
) -> dict[str, Any]:
    """Plan, graphs and embedding rows; what the manifest has of each model is returned."""
    owners = parts_of_features(folder.recipe)
    folder.plan.save(aside / "plan")
    for learner in learners.values():
        write_graphs(learner, aside / "graphs", owners)
        if isinstance(learner, Ranker) and (layers := layers_of(learner)) is not None:
            (aside / "graphs" / FILE).write_bytes(layers.to_bytes())
        if isinstance(learner, Retriever) and (tower := tower_layers_of(learner)) is not None:
            (aside / "graphs" / TOWER_FILE).write_bytes(tower.to_bytes())
        for name, collection in learner.collections.items():
            for table in collection.tables.values():
                write_rows(aside / "tables" / name / file_name(table.spec.name), table, options.rows)
    return {model: _describe(learner, aside) for model, learner in learners.items()}


def write_sides(
    aside: Path,
    folder: Checkpoint,
    models: Mapping[str, Any],
    retriever: Ranker | Retriever | None,
    snapshot: EntitySnapshot,
    recall: RecallParameters,
    options: ExportConfig,
) -> None:
    """Users and items with all that recall reads of them."""
    plan, columns = folder.plan, folder.columns
    if snapshot.users is not None:
        write_users(aside / "users", snapshot, plan, side_layout(columns, models, "user"))
    if snapshot.items is not None:
        layout, threads = side_layout(columns, models, "item"), options.threads or available_cores()
        write_items(aside / "items", snapshot, plan, layout, recall, threads)
        if isinstance(retriever, Retriever):
            write_vectors(aside / "items", snapshot, plan, retriever, options.index)


def describe_bundle(
    aside: Path,
    version: str,
    folder: Checkpoint,
    models: Mapping[str, Any],
    snapshot: EntitySnapshot,
    recall: RecallParameters,
    options: ExportConfig,
) -> dict[str, Any]:
    """What a server must know to open it."""
    recipe = recipe_to_dict(folder.recipe)
    return {
        "version": version,
        "models": models,
        "rows_dtype": options.rows,
        "products": options.products,
        "index": _kind_of_index(aside),
        "recall": recall.as_dict(),
        "created_at": time.time(),
        "recipe": recipe,
        "recipe_digest": _digest(recipe),
        "columns": [asdict(column) for column in folder.columns],
        "log_end": snapshot.log_end,
        "num_items": snapshot.items.height if snapshot.items is not None else 0,
        "num_users": snapshot.users.height if snapshot.users is not None else 0,
    }


def read_recall(folder: Checkpoint, chosen: Mapping[str, StepCheckpoint]) -> RecallParameters | None:
    """What `evaluate --served` fitted for these very checkpoints; None when it has not."""
    path = folder.path / RECALL
    if not path.is_file():
        return None
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        steps = {model: checkpoint.step for model, checkpoint in chosen.items()}
        return RecallParameters.from_dict(content["parameters"]) if content["steps"] == steps else None
    except (ValueError, KeyError, TypeError) as error:
        raise ArtifactError(f"{path} cannot be read: {error}. Run `recmill evaluate` again.") from None


# the manifest


def _facts(
    folder: Checkpoint, chosen: Mapping[str, StepCheckpoint], log_sizes: Mapping[str, int]
) -> dict[str, Any]:
    """What the bundle was made of."""
    evaluation, gate = _evaluation(folder, chosen)
    return {
        "evaluation": evaluation,
        "gate": gate,
        "checkpoint": {
            "path": address_of(folder.path.resolve()),
            "steps": {model: checkpoint.step for model, checkpoint in chosen.items()},
        },
        "log_sizes": log_sizes,
    }


def _kind_of_index(aside: Path) -> str | None:
    if not (aside / "items" / "vectors.npy").exists():
        return None
    return "clustered" if any((aside / "items" / "index").iterdir()) else "exact"


def _describe(learner: Ranker | Retriever, aside: Path) -> dict[str, Any]:
    if isinstance(learner, Retriever):
        spec = learner.spec
        user = [name for name in spec.user if name not in learner.sequences]
        return {
            "user": user,
            "item": list(spec.item),
            "sequences": list(learner.sequences),
            "dim": spec.vector_size,
            **_own_dims(learner, learner.tower_collections.values()),
        }
    tasks = learner.spec.tasks
    by_dim = learner.pooled_features(learner.deep_collections)
    return {
        "numbers": list(learner.layout.numbers),
        "keys": [name for names in by_dim.values() for name in names],
        **_own_dims(learner, [learner.deep_collections]),
        "sequences": list(learner.spec.sequences),
        "wide": list(learner.spec.wide),
        "label": learner.spec.labels[0],
        **({"labels": list(tasks.labels), "serve_score": tasks.order} if tasks is not None else {}),
        "split": (aside / "graphs" / "rank_split.onnx").exists(),
        **_layers(learner),
    }


def _layers(ranker: Ranker) -> dict[str, Any]:
    """How the layers in graphs/rank.npz make a logit."""
    layers = layers_of(ranker)
    return {} if layers is None else {"layers": {"interaction": layers.interaction}}


def _own_dims(learner: Ranker | Retriever, collections: Iterable[Mapping[int, str]]) -> dict[str, Any]:
    """The dims of features whose embeddings have not the dim of the model."""
    model_dim = learner.spec.table_dim if isinstance(learner, Ranker) else learner.spec.embedding_dim
    dims = {
        feature: dim
        for by_dim in collections
        for dim, features in learner.pooled_features(by_dim).items()
        for feature in features
        if dim != model_dim
    }
    return {"dims": dims} if dims else {}


def _evaluation(
    folder: Checkpoint, chosen: Mapping[str, StepCheckpoint]
) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
    """Metrics and the gate's verdict of the very checkpoints that are exported; None where there are none."""
    measured = {
        model: found
        for model, found in _evaluated(folder).items()
        if model in chosen and found["step"] == chosen[model].step
    }
    if not measured:
        return None, None
    evaluation = {
        model: {"step": found["step"], "split": found["split"], "metrics": found["metrics"]}
        for model, found in measured.items()
    }
    verdicts = [{"model": model, **verdict} for model, found in measured.items() for verdict in found["gate"]]
    passed = all(verdict["passed"] for verdict in verdicts)
    served = _served(folder, chosen)
    if served is not None:
        evaluation["served"] = {
            name: served[name] for name in ("split", "users", "metrics", "baselines", "stages")
        }
    return evaluation, {"passed": passed, "verdicts": verdicts} if verdicts else None


def _copy_report(folder: Checkpoint, chosen: Mapping[str, StepCheckpoint], aside: Path) -> None:
    """The page that evaluate wrote goes along, if it is about what is exported."""
    if _evaluation(folder, chosen)[0] is None:
        return
    report = json.loads((folder.path / EVALUATION).read_text(encoding="utf-8")).get("report")
    if report is not None:
        # The path was one of the machine that evaluated; beside the checkpoint, the report travels with it.
        for path in (Path(report), folder.path / Path(report).name):
            if path.is_file():
                shutil.copyfile(path, aside / REPORT)
                return


def _check_gate(folder: Checkpoint, chosen: Mapping[str, StepCheckpoint], options: ExportConfig) -> None:
    gate = _evaluation(folder, chosen)[1]
    served = _served(folder, chosen)
    if served is not None and not served["passed"] and not options.despite_gate:
        found, popular = (part["recall@10"] for part in (served["metrics"], served["baselines"]["popular"]))
        raise ArtifactError(
            f"The list that {folder.path} would serve did not meet its gate: recall@10 {found:.4f}, most popular items "
            f"{popular:.4f}. It is not published. Change the recipe, or add --despite-gate."
        )
    if gate is not None and not gate["passed"] and not options.despite_gate:
        raise ArtifactError(
            f"{folder.path} did not meet the conditions that it was evaluated against, so it is not published. "
            "Train it further, or add --despite-gate."
        )


def _served(folder: Checkpoint, chosen: Mapping[str, StepCheckpoint]) -> dict[str, Any] | None:
    """What was measured of the lists of these very checkpoints."""
    served = _read_evaluation(folder).get("served")
    steps = {model: checkpoint.step for model, checkpoint in chosen.items()}
    return dict(served) if served is not None and served["steps"] == steps else None


def _evaluated(folder: Checkpoint) -> dict[str, Any]:
    return dict(_read_evaluation(folder).get("models", {}))


def _read_evaluation(folder: Checkpoint) -> dict[str, Any]:
    path = folder.path / EVALUATION
    if not path.is_file():
        return {}
    try:
        content = dict(json.loads(path.read_text(encoding="utf-8")))
        content["models"].items()
        return content
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ArtifactError(f"{path} cannot be read: {error}. Run `recmill evaluate` again.") from None


def _version(
    folder: Checkpoint, chosen: Mapping[str, StepCheckpoint], inputs: Inputs, options: ExportConfig
) -> str:
    """Equal for bundles that would be equal: made of the same checkpoints and log, in the same way."""
    steps = {model: checkpoint.manifest["files"] for model, checkpoint in chosen.items()}
    content = [
        recipe_to_dict(folder.recipe),
        folder.plan.digest(),
        steps,
        inputs.fingerprint(),
        _evaluation(folder, chosen),
        (read_recall(folder, chosen) or UNFITTED).as_dict(),
        options.rows,
        options.index,
        options.products,
    ]
    return f"{max(checkpoint.step for checkpoint in chosen.values()):010d}-{_digest(content)[:8]}"


def _digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
