"""A ranker: numbers and pooled embeddings through a dense model to the probability of a click."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from recmill import _native
from recmill.dataset.batch import Array, Batch, Keys, Layout
from recmill.dataset.schedule import Cursor
from recmill.embeddings.collection import BatchLookup, Column
from recmill.embeddings.table import DiskTier
from recmill.errors import TrainingError
from recmill.features.chain import ColumnInfo
from recmill.features.labels import check_binary, check_follows, check_numbers_of, check_weights
from recmill.features.predictions import predictions_of
from recmill.learner.base import Learner, StepResult, check_numbers, columns_of, norm_of_rows, pooled_inputs
from recmill.learner.gradients import RowGradients
from recmill.learner.trees import fit_blend
from recmill.metrics import RankerSums, ScoreSums, TaskSums
from recmill.models.averaged import AveragedRanker
from recmill.models.bst import BST
from recmill.models.dcn import DCN
from recmill.models.deepfm import DeepFM
from recmill.models.din import DIN
from recmill.models.dlrm import DLRM
from recmill.models.fm import FM
from recmill.models.lr import LogisticRegression
from recmill.models.masknet import MaskNet
from recmill.models.multi_task import ESMM, PLE, MMoE, MultiTask, SharedBottom
from recmill.models.numbers import LOGARITHMIC, NumberRanker, as_predicted
from recmill.models.own import Loss, own_loss, own_model
from recmill.models.sequences import pad_lists
from recmill.models.trees import BlendedRanker, TreeEnsemble, TreeRanker
from recmill.models.wide_deep import WideDeep
from recmill.number_metrics import NumberSums
from recmill.recipe import recipe as r

# Models that read lists unpooled also receive, for each list, the index of the pooled feature that shares its table.
MODELS: dict[str, Callable[..., nn.Module]] = {
    "lr": LogisticRegression,
    "fm": FM,
    "deepfm": DeepFM,
    "wide_deep": WideDeep,
    "dlrm": DLRM,
    "dcn": DCN,
    "masknet": MaskNet,
    "din": DIN,
    "bst": BST,
    "shared_bottom": SharedBottom,
    "mmoe": MMoE,
    "ple": PLE,
    "esmm": ESMM,
    r.TREES: TreeRanker,
}


class Ranker(Learner):
    """The numbers, tables, dense weights and optimizers of one ranking model."""

    def __init__(
        self,
        spec: r.Ranking,
        columns: Sequence[ColumnInfo],
        num_threads: int = 1,
        disk: DiskTier | None = None,
    ) -> None:
        super().__init__(spec.train, num_threads, disk, spec.dynamic)
        self.spec = spec
        read = spec.features_among(column.name for column in columns if column.role == "feature")
        deep = Layout.of(columns, list(dict.fromkeys((*read, *spec.sequences))))
        by_name = {column.name: column for column in columns}
        self.deep_features = deep.features
        of_trees = spec.trees.features if spec.trees is not None else ()
        others = [name for name in (*spec.wide, *of_trees) if name not in deep.features]
        self.layout = Layout.of(columns, [*deep.features, *others])
        pooled = [name for name in deep.keys if name not in spec.sequences]
        deep_columns = [
            replace(by_name[name], dim=None) if by_name[name].dim == spec.embedding_dim else by_name[name]
            for name in (*pooled, *spec.sequences)
        ]
        self.deep_collections = self.add_tables(
            "deep", deep_columns, spec.table_dim, spec.train.sparse, spec.sequences
        )
        if spec.wide:
            wide_optimizer = spec.wide_optimizer or r.Optimizer("ftrl", 0.05, initial_accumulator=1.0)
            weights = [replace(by_name[name], dim=1) for name in spec.wide]
            self.add_tables("wide", weights, 1, wide_optimizer)
        make = MODELS.get(spec.model) or own_model(spec.model)
        targets = [self._targets()] if spec.sequences else []
        members = [make(spec, len(deep.number_columns), len(pooled), *targets) for _ in range(spec.average)]
        model = members[0] if len(members) == 1 else AveragedRanker(members)
        if spec.trees is not None and spec.model != r.TREES:
            model = BlendedRanker(
                model, len(deep.number_columns), TreeEnsemble(spec.trees.rounds, spec.trees.depth)
            )
        if spec.number_losses:
            model = NumberRanker(model, spec.labels, spec.number_losses)
        if deep_columns:
            self.add_projection(model, self.deep_collections, spec.table_dim, spec.average)
        if spec.tasks is not None and spec.tasks.uncertainty:
            model.register_parameter("log_variances", nn.Parameter(torch.zeros(len(spec.labels))))
        self._row_losses: Loss = log_losses
        if isinstance(model, NumberRanker):
            self._row_losses = model.row_losses
        elif spec.loss:
            self._row_losses = own_loss(spec.loss)
        self.set_model(model)
        self._bfloat16 = spec.train.precision == "bfloat16"
        if self._bfloat16:
            check_bfloat16()

    def start(self, batch: Batch, add_up: Callable[[float], float] = float) -> None:
        """Initialise with a constant prediction: the positive rate or a number's mean, in the first batch."""
        if isinstance(self.model, NumberRanker):
            self.model.start(self._number_sums(batch, add_up), batch.total)
        model = self.model.model if isinstance(self.model, NumberRanker) else self.model
        if isinstance(model, MultiTask):
            model.start([self._positive_rate(batch, label, add_up) for label in self.spec.labels])
        elif self.spec.tasks is None:
            rate = self._positive_rate(batch, self.spec.label, add_up)
            self._set_output_bias(math.log(rate / (1 - rate)))

    def _positive_rate(self, batch: Batch, label: str, add_up: Callable[[float], float]) -> float:
        """The positive rate of each label; 1/2 for a numeric label, whose mean is not predicted by the model."""
        if label in self.spec.number_losses:
            return 0.5
        return (add_up(float(batch.labels[label].sum())) + 0.5) / (batch.total + 1)

    def _number_sums(self, batch: Batch, add_up: Callable[[float], float]) -> list[tuple[float, float]]:
        """Sums of each label and of its squares, on the scale of predictions."""
        losses = self.spec.number_losses
        known = [
            as_predicted(losses.get(label, ""), batch.labels[label].astype(np.float64))
            for label in self.spec.labels
        ]
        return [(add_up(float(one.sum())), add_up(float(np.square(one).sum()))) for one in known]

    def _set_output_bias(self, value: float) -> None:
        """Set the bias of every member's output; a user-defined one may have none."""
        for module in self.model.modules():
            bias = getattr(module, "output_bias", None)
            if isinstance(bias, nn.Parameter):
                nn.init.constant_(bias, value)

    def step(self, batch: Batch, rate_factor: float = 1.0) -> StepResult:
        """Train on one batch. A loss or gradient that is not finite is an error, before any weight has changed."""
        check_numbers(batch, self.layout)
        self._check_labels(batch)
        self.model.train()
        self.steps += 1
        lookups = self._look_up(batch, train=True)
        arrays = self._arrays(lookups)
        row_grads = [np.empty_like(array) for array in arrays]
        with self.constant_buffers():
            slices = self.map_slices(
                lambda rows: self._slice_gradients(batch, arrays, row_grads, rows),
                batch.size,
                self.spec.train.micro_batches,
            )
        losses, dense, norms = zip(*slices, strict=True) if slices else ((), (), ())
        if self.spec.average > 1 and "wide" in self.collections:
            # All members read the same wide weights, which are trained on the mean of their losses.
            row_grads[list(self.collections).index("wide")] /= self.spec.average
        of_sequences = dict(zip(self.spec.sequences, row_grads[len(lookups) :], strict=True))
        gradients = [
            RowGradients(name, self.collections[name], lookup, grads, of_sequences if name == "deep" else {})
            for (name, lookup), grads in zip(lookups.items(), row_grads, strict=False)
        ]
        return StepResult(self.apply_gradients(sum(losses), dense, gradients, sum(norms), rate_factor))

    def predict(self, batch: Batch) -> Array:
        """Probabilities or numbers [B], with several tasks [B, K]. Changes no state, not even counts of keys."""
        check_numbers(batch, self.layout)
        self.model.eval()
        arrays = self._arrays(self._look_up(batch, train=False))

        def predict_slice(rows: slice) -> Array:
            with torch.no_grad():
                logits = self._logits(batch, rows, self._vectors(batch, arrays, rows))
                if self.spec.number_losses:
                    return predictions_of(logits.numpy(), self.spec.labels, self.spec.number_losses)
                return np.asarray(torch.sigmoid(logits).numpy())

        none = np.empty(self._shape(0), np.float32)
        return np.concatenate(self.map_slices(predict_slice, batch.size) or [none])

    def fit_blend(self, batches: Iterable[tuple[Batch, Cursor]]) -> None:
        """Blend the scores of model and trees for the best prediction of the batches' labels."""
        assert isinstance(self.model, BlendedRanker)
        self.model.eval()
        logits, labels = [], []
        for batch, _ in batches:
            arrays, rows = self._arrays(self._look_up(batch, train=False)), slice(0, batch.size)
            with torch.no_grad():
                both = self.model.logits(*self._inputs(batch, rows, self._vectors(batch, arrays, rows)))
            logits.append(torch.stack([found for found in both if found is not None], dim=1).numpy())
            labels.append(batch.labels[self.spec.label])
        self.model.blend.copy_(fit_blend(np.concatenate(logits), np.concatenate(labels)))

    def evaluate(self, batches: Iterable[tuple[Batch, Cursor]]) -> RankerSums:
        """Metrics of the predictions on these batches."""
        sums = self.new_sums()
        for batch, _ in batches:
            sums.add(self.labels_of(batch), self.predict(batch))
        return sums

    def new_sums(self) -> RankerSums:
        of_labels = {
            label: NumberSums() if label in self.spec.number_losses else ScoreSums()
            for label in self.spec.labels
        }
        return of_labels[self.spec.label] if self.spec.tasks is None else TaskSums(of_labels)

    def labels_of(self, batch: Batch) -> Array:
        """Labels in the shape of `predict`: [B], with several tasks [B, K]."""
        if self.spec.tasks is None:
            return batch.labels[self.spec.label]
        return np.stack([batch.labels[label] for label in self.spec.labels], axis=1)

    def _check_labels(self, batch: Batch) -> None:
        for label in self.spec.binary_labels:
            check_binary(label, batch.labels[label])
        for label, loss in self.spec.number_losses.items():
            check_numbers_of(label, batch.labels[label], least=0 if loss in LOGARITHMIC else None)
        if self.spec.model == "esmm":
            check_follows({label: batch.labels[label] for label in self.spec.labels})
        if self.spec.weight:
            check_weights(self.spec.weight, batch.labels[self.spec.weight])

    def key_columns(self, batch: Batch) -> dict[str, dict[str, Column]]:
        return {name: columns_of(batch.keys, collection) for name, collection in self.collections.items()}

    def _look_up(self, batch: Batch, train: bool) -> dict[str, BatchLookup]:
        return {
            name: self.collections[name].lookup(columns, train, self.steps)
            for name, columns in self.key_columns(batch).items()
        }

    def _targets(self) -> list[int]:
        """For each sequence, the index of the pooled feature with the same vocabulary."""
        features = self.collections["deep"].features
        pooled = [feature for feature in features if feature.pooling == "none"]
        by_table = {feature.table: features.index(feature) for feature in reversed(pooled)}
        return [by_table[feature.table] for feature in features if feature.is_sequence]

    def _arrays(self, lookups: Mapping[str, BatchLookup]) -> list[Array]:
        """Arrays of a lookup: one vector per row of each collection, then the vectors of each sequence."""
        sequences = [lookups["deep"].sequences[name] for name in self.spec.sequences]
        return [*(lookup.values for lookup in lookups.values()), *sequences]

    def _ranges(self, batch: Batch, rows: slice) -> list[slice]:
        """The ranges of some rows in each array of `_arrays`."""
        ranges = [rows] * len(self.collections)
        for name in self.spec.sequences:
            offsets = batch.keys[name].offsets
            assert offsets is not None
            ranges.append(slice(int(offsets[rows.start]), int(offsets[rows.stop])))
        return ranges

    def _vectors(self, batch: Batch, arrays: Sequence[Array], rows: slice) -> list[Tensor]:
        ranges = self._ranges(batch, rows)
        return [torch.from_numpy(array[some]) for array, some in zip(arrays, ranges, strict=True)]

    def _slice_gradients(
        self, batch: Batch, arrays: Sequence[Array], row_grads: list[Array], rows: slice
    ) -> tuple[float, list[Tensor], float]:
        """Loss, dense gradients and their norm for some rows, as parts of the batch's mean; fills `row_grads`."""
        vectors = [vector.requires_grad_() for vector in self._vectors(batch, arrays, rows)]
        logits = self._logits(batch, rows, vectors, self._repeats(batch, rows))
        loss = self._loss(batch, rows, logits) / batch.total
        if not loss.requires_grad:  # trees, which were fitted before
            return float(loss), [], 0.0
        gradients = torch.autograd.grad(loss, [*self.parameters, *vectors])
        dense = list(gradients[: len(self.parameters)])
        ranges = self._ranges(batch, rows)
        for index, gradient in enumerate(gradients[len(dense) :]):
            if rows == slice(0, batch.size):  # all of them: no copy
                row_grads[index] = gradient.numpy()
            else:
                row_grads[index][ranges[index]] = gradient.numpy()
        mean_loss = float(loss.detach()) / self.spec.average
        return mean_loss, dense, sum(map(norm_of_rows, gradients[len(dense) :]))

    def _loss(self, batch: Batch, rows: slice, logits: Tensor) -> Tensor:
        """The weighted sum over rows; for several tasks, also over these, with their weights; and over members."""
        labels = torch.from_numpy(self.labels_of(batch)[rows])
        if self.spec.average > 1:
            labels = labels.unsqueeze(1).expand_as(logits)
        if self.spec.tasks is None and not self.spec.weight and not self.spec.loss:
            return functional.binary_cross_entropy_with_logits(logits, labels, reduction="sum")
        losses = self._row_losses(logits, labels)
        if losses.shape != logits.shape:
            raise TrainingError(
                f'ranking.loss "{self.spec.loss}" gave {tuple(losses.shape)} for logits {tuple(logits.shape)}; '
                "expected the loss of each, not their sum or mean."
            )
        if self.spec.weight:
            weights_B = torch.from_numpy(batch.labels[self.spec.weight][rows])
            losses = losses * (weights_B if losses.dim() == 1 else weights_B.unsqueeze(1))
        if self.spec.tasks is None:
            return losses.sum()
        return self._weigh_tasks(self.spec.tasks, losses.sum(dim=0), logits.shape[0])

    def _weigh_tasks(self, tasks: r.Tasks, sums_K: Tensor, num_rows: int) -> Tensor:
        """The sum over tasks: weights are given, or learned as 1 / variance, at the cost of log(variance) / 2."""
        if tasks.uncertainty:
            log_variances_K = self.model.get_parameter("log_variances")
            return (sums_K * torch.exp(-log_variances_K) + num_rows / 2 * log_variances_K).sum()
        return sums_K @ torch.tensor([tasks.weights.get(label, 1.0) for label in self.spec.labels])

    def _shape(self, num_rows: int) -> tuple[int, ...]:
        """The shape of the logits and probabilities of this many rows."""
        return (num_rows,) if self.spec.tasks is None else (num_rows, len(self.spec.labels))

    def _repeats(self, batch: Batch, rows: slice) -> dict[str, _native.Repeats | None]:
        """The pooled features whose ids repeat in some rows, for a model that multiplies each id's vector once."""
        if not getattr(self.model, "takes_repeats", False):
            return {}
        pooled = self.pooled_features(self.deep_collections)
        keys = [batch.keys[name] for names in pooled.values() for name in names]
        ids = [one.values[rows] if one.offsets is None else None for one in keys]
        return {"repeats": _native.find_repeats(ids, self.spec.embedding_dim)}

    def _logits(
        self,
        batch: Batch,
        rows: slice,
        vectors: Sequence[Tensor],
        options: Mapping[str, _native.Repeats | None] = MappingProxyType({}),
    ) -> Tensor:
        inputs = self._inputs(batch, rows, vectors)
        num_rows = rows.stop - rows.start
        if self._bfloat16:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                logits = self.model(*inputs, **options).float()
        else:
            logits = self.model(*inputs, **options)
        expected = self._shape(num_rows)
        if self.spec.average > 1 and self.model.training:
            expected = (num_rows, self.spec.average)
        if logits.shape != expected:
            raise TrainingError(
                f'Model "{self.spec.model}" gave {tuple(logits.shape)} for {num_rows} rows; '
                f"expected one logit for each row{'' if self.spec.tasks is None else ' and task'}: "
                f"{expected}."
            )
        return logits  # type: ignore[no-any-return]

    def _inputs(self, batch: Batch, rows: slice, vectors: Sequence[Tensor]) -> list[Any]:
        """The arguments of models: numbers, pooled embeddings and, if there are any, sequences and wide weights."""
        num_collections = len(self.collections)
        lists = [
            pad_lists(rows_ND, _lengths(batch.keys[name], rows))
            for name, rows_ND in zip(self.spec.sequences, vectors[num_collections:], strict=True)
        ]
        num_deep = len(self.deep_collections)
        deep = dict(zip(self.deep_collections, vectors[:num_deep], strict=True))
        none = torch.zeros((rows.stop - rows.start, 0, self.spec.table_dim))
        pooled = pooled_inputs(self.model, deep) if deep else none
        wide = [weights.squeeze(2) for weights in vectors[num_deep:num_collections]]
        return [torch.from_numpy(batch.numbers[rows]), pooled, *([lists] if lists else []), *wide]


def _lengths(keys: Keys, rows: slice) -> Array:
    assert keys.offsets is not None
    return np.diff(keys.offsets[rows.start : rows.stop + 1])


def log_losses(logits: Tensor, labels: Tensor) -> Tensor:
    """The log loss of each logit."""
    return functional.binary_cross_entropy_with_logits(logits, labels, reduction="none")


def check_bfloat16() -> None:
    """Check that the CPU supports bfloat16; emulated, it would be slower than float32."""
    if not (torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()):
        raise TrainingError(
            'train.precision is "bfloat16", but this CPU has neither AVX-512 BF16 nor AMX. Use "float32".'
        )
