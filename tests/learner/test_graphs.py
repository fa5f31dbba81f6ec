"""Graphs for servers: they give what the learner gives, whole and cut in two, also after it has learned more."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from logging import WARNING
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch
from torch import Tensor, nn

from recmill.dataset.batch import Array, Batch, Keys, Layout
from recmill.errors import MissingPackage, RecmillError
from recmill.features.chain import ColumnInfo
from recmill.learner.base import columns_of
from recmill.learner.graphs.graphs import Graphs, write_graphs
from recmill.learner.graphs.split import FeatureIndices, Parts, split_model
from recmill.learner.ranking import Ranker
from recmill.learner.retrieval import Retriever
from recmill.learner.sequences import SequenceRetriever
from recmill.models.sequences import ListVectors
from recmill.models.trees import BlendedRanker
from recmill.recipe import recipe as r
from recmill.recipe.load import recipe_from_dict

pytestmark = pytest.mark.stages

DIM = 4


def numbers(*names: str, of: str) -> list[ColumnInfo]:
    return [ColumnInfo(name, "number", "feature", of) for name in names]


def ids(*names: str, of: str, kind: str = "id") -> list[ColumnInfo]:
    return [ColumnInfo(name, kind, "feature", of, size=50, vocabulary=name) for name in names]


# Parts are mixed on purpose: places in the ranker's order and in each part's order differ.
COLUMNS = [
    *numbers("price", of="item"),
    *numbers("hour", of="context"),
    *numbers("rank", of="item"),
    *numbers("age", of="user"),
    *ids("item", of="item"),
    *ids("user", of="user"),
    *ids("brand", of="item"),
    ColumnInfo("recent", "ids", "feature", "user", size=50, vocabulary="item"),
    *ids("tags", of="item", kind="ids"),
    *ids("device", of="context"),
    ColumnInfo("user_x_item", "id", "feature", "crossed", size=50, vocabulary="crossed"),
    ColumnInfo("click", "number", "label"),
]
NO_ITEM_NUMBERS = [c for c in COLUMNS if not (c.kind == "number" and c.of == "item")]
NO_NUMBERS = [c for c in COLUMNS if not (c.kind == "number" and c.role == "feature")]
ONLY_ITEM_NUMBERS = [c for c in COLUMNS if not (c.kind == "number" and c.of in ("user", "context"))]
ONE_OF_EACH = [c for c in NO_NUMBERS if c.name in ("user", "item", "click")]
NO_USER = [c for c in COLUMNS if c.of in ("item", "crossed") or c.role == "label"]
COLUMN_SETS = {
    "mixed": COLUMNS,
    "no item numbers": NO_ITEM_NUMBERS,
    "no numbers": NO_NUMBERS,
    "only item numbers": ONLY_ITEM_NUMBERS,
    "one of each": ONE_OF_EACH,
    "nothing of users": NO_USER,
}
OWNERS = {column.name: column.of for column in COLUMNS}
OF_USER = [name for name, owner in OWNERS.items() if owner in ("user", "context")]


class OwnModel(nn.Module):
    """A user's model: gates, a norm and no MLP of ours."""

    def __init__(self, spec: r.Ranking, num_numbers: int, num_embedded: int) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.randn(num_embedded))
        self.norm = nn.LayerNorm(num_embedded * spec.embedding_dim)
        self.last = nn.Linear(num_numbers + num_embedded * spec.embedding_dim, 1)
        self.scale = 1.0

    def forward(self, numbers_BF: Tensor, pooled_BTD: Tensor, wide_BW: Tensor | None = None) -> Tensor:
        gated = self.norm((pooled_BTD * torch.sigmoid(self.gate)[:, None]).flatten(1))
        logits = self.last(torch.cat([numbers_BF, gated], dim=1)).squeeze(1) * self.scale
        return logits if wide_BW is None else logits + wide_BW.sum(dim=1)


class BranchingModel(OwnModel):
    """It looks at values, which no graph can."""

    def forward(self, numbers_BF: Tensor, pooled_BTD: Tensor, wide_BW: Tensor | None = None) -> Tensor:
        if float(pooled_BTD.sum()) > 0:
            return super().forward(numbers_BF, pooled_BTD, wide_BW)
        return pooled_BTD.sum(dim=(1, 2))


SPECS = {
    "cat": r.Ranking("dlrm", "click", (), DIM, (8, DIM), (16, 8), "cat"),
    "cat, no bottom": r.Ranking("dlrm", "click", (), DIM, (), (16,), "cat"),
    "cat, no top": r.Ranking("dlrm", "click", (), DIM, (8, 6), (), "cat"),
    "dot": r.Ranking("dlrm", "click", (), DIM, (8, DIM), (16, 8), "dot"),
    "cross": r.Ranking("dlrm", "click", (), DIM, (8, DIM), (16,), "cross", 2, 3),
    "deep": r.Ranking("wide_deep", "click", (), DIM, hidden=(16, 8), dropout=0.5),
    "linear": r.Ranking("wide_deep", "click", (), DIM, wide=("item", "user")),
    "wide and deep": r.Ranking("wide_deep", "click", (), DIM, hidden=(8,), wide=("item", "user")),
    "dot, wide": r.Ranking("dlrm", "click", (), DIM, (8, DIM), (16, 8), "dot", wide=("item", "user")),
    "trees": r.Ranking("wide_deep", "click", (), DIM, hidden=(8,), trees=r.Trees(("price", "age"), 3, 2)),
    "averaged": r.Ranking("dlrm", "click", (), DIM, (8, DIM), (16, 8), "dot", wide=("item",), average=2),
    "averaged din": r.Ranking("din", "click", (), DIM, hidden=(8,), sequences=("recent",), average=2),
    "averaged, trees": r.Ranking(
        "wide_deep", "click", (), DIM, hidden=(8,), average=3, trees=r.Trees(("price", "age"), 3, 2)
    ),
    "lr": r.Ranking("lr", "click", (), 1),
    "fm": r.Ranking("fm", "click", (), DIM, wide=("item", "user")),
    "deepfm": r.Ranking("deepfm", "click", (), DIM, hidden=(8,)),
    "dcn": r.Ranking("dcn", "click", (), DIM, hidden=(8,), cross_layers=2),
    "masknet": r.Ranking("masknet", "click", (), DIM, hidden=(8,), mask_blocks=2, mask_width=8),
    "din": r.Ranking("din", "click", (), DIM, hidden=(8,), sequences=("recent",)),
    "din, wide": r.Ranking(
        "din", "click", (), DIM, hidden=(8,), sequences=("recent",), wide=("item", "recent")
    ),
    "own": r.Ranking(f"{__name__}:OwnModel", "click", (), DIM),
    "own, wide": r.Ranking(f"{__name__}:OwnModel", "click", (), DIM, wide=("item",)),
}


def random_batch(layout: Layout, num_rows: int, of_user: Sequence[str] = ()) -> Batch:
    """Random rows; features named in `of_user` are the same in all of them."""
    random = np.random.default_rng(num_rows)
    values = random.standard_normal((num_rows, len(layout.numbers))).astype(np.float32)
    for place, name in enumerate(layout.numbers):
        values[:, place] = values[0, place] if name in of_user else values[:, place]
    keys = {name: _random_keys(random, name, num_rows, name in of_user) for name in layout.keys}
    return Batch(num_rows, values, keys, {}, {"click": random.integers(0, 2, num_rows).astype(np.float32)})


def _random_keys(random: np.random.Generator, name: str, num_rows: int, is_same: bool) -> Keys:
    is_list = name in ("recent", "tags")
    lengths = random.integers(0, 4, num_rows) if is_list else np.ones(num_rows, np.int64)
    lists = [random.integers(0, 50, length) for length in lengths]
    lists = [lists[0]] * num_rows if is_same else lists
    offsets = np.concatenate([[0], np.cumsum([len(some) for some in lists])]).astype(np.int64)
    return Keys(np.concatenate(lists).astype(np.int64), offsets if is_list else None)


def trained_ranker(spec: r.Ranking, columns: Sequence[ColumnInfo]) -> Ranker:
    ranker = Ranker(spec, columns)
    for number in range(3):
        ranker.step(random_batch(ranker.layout, 40 + number))
    if isinstance(ranker.model, BlendedRanker):
        trees = ranker.model.trees
        trees.features.random_(len(ranker.layout.numbers))
        for values in (trees.thresholds, trees.values, ranker.model.blend):
            values.normal_()
    return ranker


def whole_inputs(ranker: Ranker, batch: Batch) -> dict[str, Array]:
    """What a server feeds to rank.onnx, zero-width inputs too."""
    looked = {
        name: made.lookup(columns_of(batch.keys, made), False, 0).values
        for name, made in ranker.collections.items()
    }
    wide = looked["wide"][:, :, 0] if "wide" in looked else np.zeros((batch.size, 0), np.float32)
    return {"numbers": batch.numbers, "pooled": looked["deep"], "wide": wide, **lists_of(ranker, batch)}


def lists_of(ranker: Ranker, batch: Batch) -> dict[str, Array]:
    """The lists that are not pooled, filled up by hand."""
    inputs: dict[str, Array] = {}
    made = ranker.collections["deep"]
    for index, name in enumerate(ranker.spec.sequences):
        keys = batch.keys[name]
        vectors = made.lookup(columns_of(batch.keys, made), False, 0).sequences[name]
        lengths = np.diff(keys.offsets)
        padded = np.zeros((batch.size, max(1, lengths.max()), vectors.shape[1]), np.float32)
        for row, length in enumerate(lengths):
            padded[row, :length] = vectors[keys.offsets[row] : keys.offsets[row + 1]]
        inputs[f"list{index}"] = padded
        inputs[f"mask{index}"] = (np.arange(padded.shape[1]) < lengths[:, None]).astype(np.float32)
    return inputs


def pooled_names(ranker: Ranker) -> list[str]:
    return [part.name for part in ranker.collections["deep"].features if not part.is_sequence]


def split_inputs(ranker: Ranker, batch: Batch) -> dict[str, Array]:
    """The same for rank_split.onnx: the user part from the first row, the item part from all."""
    names = {
        "numbers": ranker.layout.numbers,
        "pooled": pooled_names(ranker),
        "wide": ranker.spec.wide,
    }
    whole = whole_inputs(ranker, batch)
    inputs = {f"user_{name}": whole.pop(name)[:1] for name in lists_of(ranker, batch)}
    for kind, values in whole.items():
        once = np.array([OWNERS[name] in ("user", "context") for name in names[kind]], dtype=bool)
        inputs[f"user_{kind}"], inputs[f"item_{kind}"] = values[:1, once], values[:, ~once]
    return inputs


def run(path: Path, inputs: dict[str, Array]) -> Array:
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    names = [node.name for node in session.get_inputs()]
    assert set(names) == {name for name in inputs if inputs[name].shape[1]}
    (output,) = session.run(None, {name: np.ascontiguousarray(inputs[name]) for name in names})
    return np.asarray(output)


def sigmoid(logits: Array) -> Array:
    return np.asarray(1 / (1 + np.exp(-logits.astype(np.float64))))


def logits_of(ranker: Ranker, batch: Batch) -> Array:
    whole = {name: torch.from_numpy(values) for name, values in whole_inputs(ranker, batch).items()}
    wide = [whole["wide"]] if ranker.spec.wide else []
    lists = [ListVectors(whole["list0"], whole["mask0"])] if ranker.spec.sequences else []
    inputs = [whole["numbers"], whole["pooled"], *([lists] if lists else []), *wide]
    with torch.no_grad():
        return np.asarray(ranker.model.eval()(*inputs).numpy())


def assert_same_scores(ranker: Ranker, paths: dict[str, Path]) -> None:
    for num_rows in (1, 7, 500):
        batch = random_batch(ranker.layout, num_rows, OF_USER)
        logits, scores = logits_of(ranker, batch), ranker.predict(batch)
        for found in (
            run(paths["rank"], whole_inputs(ranker, batch)),
            run(paths["rank_split"], split_inputs(ranker, batch)),
        ):
            np.testing.assert_allclose(found, logits, rtol=1e-5, atol=1e-5)
            np.testing.assert_allclose(sigmoid(found), scores, atol=1e-6)


def ranker_of(spec: str, columns: str) -> Ranker:
    known = {column.name: column for column in COLUMN_SETS[columns]}
    has_numbers = any(column.kind == "number" and column.role == "feature" for column in known.values())
    chosen = replace(
        SPECS[spec],
        wide=tuple(name for name in SPECS[spec].wide if name in known),
        sequences=tuple(name for name in SPECS[spec].sequences if name in known),
        model="wide_deep" if SPECS[spec].model == "din" and "recent" not in known else SPECS[spec].model,
        bottom=SPECS[spec].bottom if has_numbers else (),
        trees=SPECS[spec].trees if {"price", "age"} <= set(known) else None,
    )
    return trained_ranker(chosen, COLUMN_SETS[columns])


@pytest.mark.parametrize("columns", COLUMN_SETS)
@pytest.mark.parametrize("spec", SPECS)
def test_a_ranker_cut_in_two_scores_the_same(spec: str, columns: str) -> None:
    ranker = ranker_of(spec, columns)
    deep = pooled_names(ranker)
    kinds = (FeatureIndices.of(names, OWNERS) for names in (ranker.layout.numbers, deep, ranker.spec.wide))
    cut = split_model(ranker.model.eval(), Parts(*kinds))
    for num_rows in (1, 7, 500):
        batch = random_batch(ranker.layout, num_rows, OF_USER)
        inputs = {name: torch.from_numpy(value) for name, value in split_inputs(ranker, batch).items()}
        with torch.no_grad():
            found = cut({name: value for name, value in inputs.items() if value.shape[1]}).numpy()
        np.testing.assert_allclose(found, logits_of(ranker, batch), rtol=1e-5, atol=1e-5)


CASES = [
    ("cat", "mixed"),
    ("dot", "no item numbers"),
    ("cross", "mixed"),
    ("wide and deep", "mixed"),
    ("deep", "mixed"),  # with dropout
    ("trees", "mixed"),
    ("lr", "mixed"),
    ("fm", "mixed"),
    ("deepfm", "no numbers"),
    ("dcn", "no numbers"),
    ("masknet", "mixed"),
    ("din", "mixed"),
    ("din, wide", "no numbers"),
    ("own", "no numbers"),
]


@pytest.mark.parametrize(("spec", "columns"), CASES)
def test_graphs_score_as_the_ranker_does(spec: str, columns: str, tmp_path: Path) -> None:
    ranker = ranker_of(spec, columns)
    assert_same_scores(ranker, write_graphs(ranker, tmp_path, OWNERS))


@pytest.mark.parametrize("spec", ["dot", "own, wide"])
def test_graphs_written_again_have_the_weights_of_now(spec: str, tmp_path: Path) -> None:
    ranker = ranker_of(spec, "mixed")
    graphs = Graphs(ranker, OWNERS)
    graphs.write(tmp_path)
    for number in range(3):
        ranker.step(random_batch(ranker.layout, 60 + number))
    again, fresh = graphs.write(tmp_path), write_graphs(ranker, tmp_path / "fresh", OWNERS)
    assert_same_scores(ranker, again)
    assert {name: path.read_bytes() for name, path in again.items()} == {
        name: path.read_bytes() for name, path in fresh.items()
    }


def test_a_model_that_changed_in_more_than_its_weights_is_traced_again(tmp_path: Path) -> None:
    ranker = ranker_of("own", "mixed")
    graphs = Graphs(ranker, OWNERS)
    graphs.write(tmp_path)
    ranker.model.scale = 3.0
    assert_same_scores(ranker, graphs.write(tmp_path))


@pytest.mark.parametrize(
    ("item", "hidden"), [(["item", "price"], [16, 8]), (["item", "price"], []), (["item"], [8])]
)
def test_graphs_give_the_vectors_of_the_towers(item: list[str], hidden: list[int], tmp_path: Path) -> None:
    retriever = Retriever(shop_recipe(item, hidden), COLUMNS)
    graphs = Graphs(retriever, OWNERS)
    graphs.write(tmp_path)
    for _ in range(2):
        retriever.step(random_batch(retriever.layout, 64))
    paths = graphs.write(tmp_path)
    assert set(paths) == {"user", "item"}
    for side, vectors in (("user", retriever.user_vectors), ("item", retriever.item_vectors)):
        for num_rows in (1, 7, 500):
            batch = random_batch(retriever.layouts[side], num_rows)
            made = retriever.collections[side]
            pooled = made.lookup(columns_of(batch.keys, made), False, 0).values
            found = run(paths[side], {"numbers": batch.numbers, "pooled": pooled})
            np.testing.assert_allclose(found, vectors(batch), atol=1e-5)


def test_graphs_give_the_vectors_of_a_sequence_tower(tmp_path: Path) -> None:
    recipe = shop_recipe(["item"], [])
    assert recipe.retrieval is not None
    spec = r.Retrieval("click", ("recent",), ("item",), "sasrec", DIM, blocks=1, negatives=5)
    retriever = SequenceRetriever(replace(recipe, retrieval=spec), COLUMNS)
    retriever.step(random_batch(retriever.layout, 64))
    paths = write_graphs(retriever, tmp_path, OWNERS)
    for num_rows in (1, 7, 500):
        batch = random_batch(retriever.layouts["user"], num_rows)
        lengths = np.diff(batch.keys["recent"].offsets)
        mask = (np.arange(max(1, lengths.max())) < lengths[:, None]).astype(np.float32)
        table = retriever.tables["item/item"]
        vectors = table.pool(table.lookup(batch.keys["recent"].values, False))
        padded = np.zeros((*mask.shape, DIM), np.float32)
        padded[mask == 1] = vectors
        found = run(paths["user"], {"list0": padded, "mask0": mask})
        np.testing.assert_allclose(found, retriever.user_vectors(batch), atol=1e-5)


def test_without_features_of_items_there_is_no_split_graph(tmp_path: Path) -> None:
    ranker = ranker_of("cat", "mixed")
    assert set(write_graphs(ranker, tmp_path, dict.fromkeys(OWNERS, "context"))) == {"rank"}


def test_a_model_trained_in_bfloat16_is_written_as_float32(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: True)
    spec = SPECS["cat"]
    ranker = trained_ranker(replace(spec, train=replace(spec.train, precision="bfloat16")), COLUMNS)
    batch = random_batch(ranker.layout, 100)
    inputs = whole_inputs(ranker, batch)
    logits = run(write_graphs(ranker, tmp_path, OWNERS)["rank"], inputs)
    with torch.no_grad():
        expected = ranker.model(torch.from_numpy(inputs["numbers"]), torch.from_numpy(inputs["pooled"]))
    np.testing.assert_allclose(logits, expected.numpy(), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(sigmoid(logits), ranker.predict(batch), atol=0.02)


def test_writing_says_nothing_and_notes_nothing_of_the_machine(tmp_path: Path, capfd, caplog) -> None:
    paths = write_graphs(ranker_of("dot", "mixed"), tmp_path, OWNERS)
    assert (*capfd.readouterr(), [said for said in caplog.records if said.levelno >= WARNING]) == ("", "", [])
    assert sorted(tmp_path.iterdir()) == sorted(paths.values())
    for path in paths.values():
        assert b".py" not in path.read_bytes()


def test_a_model_that_cannot_be_traced_says_why(tmp_path: Path) -> None:
    ranker = Ranker(replace(SPECS["own"], model=f"{__name__}:BranchingModel"), COLUMNS)
    with pytest.raises(RecmillError, match=r'Graph "rank" cannot be traced: .* no branches on values'):
        write_graphs(ranker, tmp_path, OWNERS)


@pytest.mark.parametrize("package", ["onnx", "onnxscript", "onnxruntime"])
def test_a_missing_package_is_an_install_line(package: str, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(
        MissingPackage, match=rf'needs {package}. Install it: pip install "recmill\[export\]"'
    ):
        write_graphs(ranker_of("linear", "one of each"), tmp_path, OWNERS)


def shop_recipe(item: list[str], hidden: list[int]) -> r.Recipe:
    return recipe_from_dict(
        {
            "name": "shop",
            "log": {
                "files": ["events.tsv"],
                "user": "user",
                "item": "item",
                "columns": [
                    {"name": "user", "type": "int"},
                    {"name": "item", "type": "int"},
                    {"name": "price", "type": "float", "of": "item"},
                    {"name": "recent", "type": "text", "of": "user"},
                    {"name": "click", "type": "int"},
                ],
            },
            "split": {"by": "tail", "held_out": 0.2},
            "labels": [{"name": "click", "columns": "click"}],
            "features": [
                {"columns": "user", "steps": ["vocabulary"]},
                {"columns": "item", "steps": ["vocabulary"]},
                {"columns": "price", "steps": ["standardise"]},
                {"columns": "recent", "steps": [{"split": ","}, "vocabulary"]},
            ],
            "retrieval": {
                "label": "click",
                "user": ["user", "recent"],
                "item": item,
                "embedding_dim": DIM,
                "hidden": hidden,
            },
        }
    )
