"""A ranker: numbers and pooled embeddings through a dense model to the probability of a click."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from recmill.dataset.batch import Array, Batch, Layout
from recmill.dataset.schedule import Cursor
from recmill.embeddings.collection import BatchLookup, Column
from recmill.embeddings.table import DiskTier
from recmill.errors import FeatureError, TrainingError
from recmill.features.chain import ColumnInfo
from recmill.features.labels import check_binary
from recmill.learner.base import Learner, StepResult, check_numbers, columns_of, norm_of
from recmill.learner.gradients import RowGradients
from recmill.learner.trees import fit_blend
from recmill.metrics import ScoreSums
from recmill.models.dlrm import DLRM
from recmill.models.trees import BlendedRanker, TreeEnsemble
from recmill.models.wide_deep import WideDeep
from recmill.recipe import recipe as r

MODELS: dict[str, Callable[[r.Ranking, int, int], nn.Module]] = {"dlrm": DLRM, "wide_deep": WideDeep}


class Ranker(Learner):
    """Numbers, tables, dense weights and their optimizers of one ranking model."""

    def __init__(
        self,
        spec: r.Ranking,
        columns: Sequence[ColumnInfo],
        num_threads: int = 1,
        disk: DiskTier | None = None,
    ) -> None:
        super().__init__(spec.train, num_threads, disk)
        self.spec = spec
        self.dynamic = spec.dynamic
        deep = Layout.of(columns, spec.features or None)
        by_name = {column.name: column for column in columns}
        self.deep_features = deep.features
        of_trees = spec.trees.features if spec.trees is not None else ()
        others = [name for name in (*spec.wide, *of_trees) if name not in deep.features]
        self.layout = Layout.of(columns, [*deep.features, *others])
        deep_columns = [by_name[name] for name in deep.keys]
        self.add_tables("deep", deep_columns, spec.embedding_dim, spec.train.sparse, spec.dynamic)
        if spec.wide:
            wide_optimizer = spec.wide_optimizer or r.Optimizer("ftrl", 0.05, initial_accumulator=1.0)
            self.add_tables("wide", [by_name[name] for name in spec.wide], 1, wide_optimizer, spec.dynamic)
        make = MODELS.get(spec.model) or own_model(spec.model)
        model = make(spec, len(deep.numbers), len(deep.keys))
        if spec.trees is not None:
            model = BlendedRanker(model, len(deep.numbers), TreeEnsemble(spec.trees.rounds, spec.trees.depth))
        self.set_model(model)
        self._bfloat16 = spec.train.precision == "bfloat16"
        if self._bfloat16:
            check_bfloat16()

    def start(self, batch: Batch, add_up: Callable[[float], float] = float) -> None:
        """Begin with the share of positive rows as the answer for all, which the first batch has to estimate."""
        labels = batch.labels[self.spec.label]
        positives = add_up(float(labels.sum()))
        bias = getattr(self.model, "output_bias", None)
        if isinstance(bias, nn.Parameter):
            with torch.no_grad():
                bias.fill_(math.log((positives + 0.5) / (batch.total - positives + 0.5)))

    def step(self, batch: Batch, rate_factor: float = 1.0) -> StepResult:
        """Learn from one batch. A loss or gradient that is not finite is an error, and no weight has changed."""
        check_numbers(batch, self.layout.numbers)
        check_binary(self.spec.label, batch.labels[self.spec.label])
        self.model.train()
        self.steps += 1
        lookups = self._look_up(batch, train=True)
        row_grads = [np.empty_like(lookup.values) for lookup in lookups.values()]
        slices = self.map_slices(
            lambda rows: self._slice_gradients(batch, lookups, row_grads, rows),
            batch.size,
            self.spec.train.micro_batches,
        )
        losses, dense, norms = zip(*slices, strict=True) if slices else ((), (), ())
        gradients = [
            RowGradients(name, self.collections[name], lookup, grads)
            for (name, lookup), grads in zip(lookups.items(), row_grads, strict=True)
        ]
        loss = self.apply_gradients(sum(losses), dense, gradients, sum(norms), rate_factor)
        if self.dynamic is not None and self.steps % self.dynamic.evict_every_steps == 0:
            self.evict(self.dynamic)
        return StepResult(loss)

    def predict(self, batch: Batch) -> Array:
        """Probabilities [B]; learns nothing, not even which keys exist."""
        check_numbers(batch, self.layout.numbers)
        self.model.eval()
        lookups = self._look_up(batch, train=False)

        def predict_slice(rows: slice) -> Array:
            with torch.no_grad():
                logits = self._logits(torch.from_numpy(batch.numbers[rows]), _vectors(lookups, rows))
                return np.asarray(torch.sigmoid(logits).numpy())

        return np.concatenate(self.map_slices(predict_slice, batch.size) or [np.empty(0, np.float32)])

    def fit_blend(self, batches: Iterable[tuple[Batch, Cursor]]) -> None:
        """Blend the scores of model and trees so that the batches' labels are predicted best."""
        assert isinstance(self.model, BlendedRanker)
        self.model.eval()
        logits, labels = [], []
        for batch, _ in batches:
            lookups = self._look_up(batch, train=False)
            with torch.no_grad():
                inputs = _inputs(torch.from_numpy(batch.numbers), _vectors(lookups, slice(0, batch.size)))
                both = self.model.logits(*inputs)
            logits.append(torch.stack([found for found in both if found is not None], dim=1).numpy())
            labels.append(batch.labels[self.spec.label])
        self.model.blend.copy_(fit_blend(np.concatenate(logits), np.concatenate(labels)))

    def evaluate(self, batches: Iterable[tuple[Batch, Cursor]]) -> ScoreSums:
        """How well the batches' labels are predicted."""
        sums = ScoreSums()
        for batch, _ in batches:
            sums.add(batch.labels[self.spec.label], self.predict(batch))
        return sums

    def key_columns(self, batch: Batch) -> dict[str, dict[str, Column]]:
        return {name: columns_of(batch.keys, collection) for name, collection in self.collections.items()}

    def _look_up(self, batch: Batch, train: bool) -> dict[str, BatchLookup]:
        return {
            name: self.collections[name].lookup(columns, train, self.steps)
            for name, columns in self.key_columns(batch).items()
        }

    def _slice_gradients(
        self, batch: Batch, lookups: dict[str, BatchLookup], row_grads: list[Array], rows: slice
    ) -> tuple[float, list[Tensor], float]:
        """Loss and dense gradients of some rows, as parts of the batch's mean; fills `row_grads` and gives its norm."""
        vectors = [vector.requires_grad_() for vector in _vectors(lookups, rows)]
        labels = torch.from_numpy(batch.labels[self.spec.label][rows])
        logits = self._logits(torch.from_numpy(batch.numbers[rows]), vectors)
        loss = functional.binary_cross_entropy_with_logits(logits, labels, reduction="sum") / batch.total
        gradients = torch.autograd.grad(loss, [*self.parameters, *vectors])
        dense = list(gradients[: len(self.parameters)])
        for index, gradient in enumerate(gradients[len(dense) :]):
            if rows == slice(0, batch.size):  # all of them: no copy
                row_grads[index] = gradient.numpy()
            else:
                row_grads[index][rows] = gradient.numpy()
        return float(loss.detach()), dense, norm_of(gradients[len(dense) :])

    def _logits(self, numbers_BF: Tensor, vectors: Sequence[Tensor]) -> Tensor:
        inputs = _inputs(numbers_BF, vectors)
        if self._bfloat16:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                logits = self.model(*inputs).float()
        else:
            logits = self.model(*inputs)
        if logits.shape != (len(numbers_BF),):
            raise TrainingError(
                f'Model "{self.spec.model}" gave {tuple(logits.shape)} for {len(numbers_BF)} rows; '
                f"expected one logit for each row: ({len(numbers_BF)},)."
            )
        return logits  # type: ignore[no-any-return]


def _inputs(numbers_BF: Tensor, vectors: Sequence[Tensor]) -> list[Tensor]:
    """As models are called: numbers, pooled embeddings and, if there are any, wide weights."""
    return [numbers_BF, vectors[0], *(wide.squeeze(2) for wide in vectors[1:])]


def _vectors(lookups: dict[str, BatchLookup], rows: slice) -> list[Tensor]:
    return [torch.from_numpy(lookup.values[rows]) for lookup in lookups.values()]


def own_model(path: str) -> Callable[[r.Ranking, int, int], nn.Module]:
    """The user's module: `package.module:Class`, made and called as ours are (see models/__init__.py)."""
    module, _, name = path.partition(":")
    try:
        model = getattr(importlib.import_module(module), name)
    except ImportError as error:
        raise FeatureError(
            f'ranking.model "{path}" cannot be imported: {error}. Is it installed, or in the current directory?'
        ) from error
    except AttributeError:
        raise FeatureError(f'ranking.model "{path}": module {module} has no class {name}.') from None
    if not (isinstance(model, type) and issubclass(model, nn.Module)):
        raise FeatureError(f'ranking.model "{path}" is not a torch.nn.Module class.')
    return model


def check_bfloat16() -> None:
    """bfloat16 is for CPUs that have it; elsewhere it would be emulated, and slower than float32."""
    if not (torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()):
        raise TrainingError(
            'train.precision is "bfloat16", but this CPU has neither AVX-512 BF16 nor AMX. Use "float32".'
        )
