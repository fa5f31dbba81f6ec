"""The layers of a ranker and a user tower as plain arrays, for servers that multiply them natively. One npz file each:

bottom.0.weight [out, in], bottom.0.bias, ...     DLRM's layers over numbers; none without numbers
top.0.weight, top.0.bias, ...                     the layers over everything, up to one logit (Wide & Deep: deep)
projection.<feature> [d, D]                       of a feature whose rows have another dim than the model

tower.0.weight, tower.0.bias, ...                 a tower's layers over its numbers and then its embeddings
"""

from __future__ import annotations

import io
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from recmill.dataset.batch import Array
from recmill.errors import ArtifactError

FILE = "rank.npz"  # in graphs/
TOWER_FILE = "user.npz"
RANGES_FILE = "rank_int8.npz"
Layer = tuple[Array, Array]  # weights [out, in] and bias [out]


@dataclass(frozen=True)
class RankerLayers:
    """Linear layers, with ReLU between them and after the last of the bottom."""

    interaction: str  # cat or dot
    bottom: Sequence[Layer]
    top: Sequence[Layer]
    projections: Mapping[str, Array] = field(default_factory=dict)  # by feature

    def to_bytes(self) -> bytes:
        arrays = {f"projection.{name}": values for name, values in self.projections.items()}
        return _packed(arrays | _arrays("bottom", self.bottom) | _arrays("top", self.top))

    @classmethod
    def from_bytes(cls, content: bytes, interaction: str, where: str) -> RankerLayers:
        arrays = _unpacked(content, where)
        prefix = "projection."
        projections = {
            name.removeprefix(prefix): value for name, value in arrays.items() if name.startswith(prefix)
        }
        return cls(interaction, _chain(arrays, "bottom"), _chain(arrays, "top"), projections)


@dataclass(frozen=True)
class TowerLayers:
    """Linear layers of a tower, with ReLU between them."""

    layers: Sequence[Layer]

    def to_bytes(self) -> bytes:
        return _packed(_arrays("tower", self.layers))

    @classmethod
    def from_bytes(cls, content: bytes, where: str) -> TowerLayers:
        return cls(_chain(_unpacked(content, where), "tower"))


@dataclass(frozen=True)
class ByteRanges:
    """Calibrated ranges for int8 products: the largest inputs of the first layer, and outputs of each hidden layer."""

    inputs: Array
    hidden: Sequence[Array]

    def __or__(self, other: ByteRanges) -> ByteRanges:
        """The union of two ranges."""
        pairs = zip(self.hidden, other.hidden, strict=True)
        return ByteRanges(np.maximum(self.inputs, other.inputs), [np.maximum(*pair) for pair in pairs])

    def to_bytes(self) -> bytes:
        return _packed(
            {"inputs": self.inputs, **{f"hidden.{i}": values for i, values in enumerate(self.hidden)}}
        )

    @classmethod
    def from_bytes(cls, content: bytes, where: str) -> ByteRanges:
        arrays = _unpacked(content, where)
        return cls(arrays["inputs"], [arrays[f"hidden.{index}"] for index in range(len(arrays) - 1)])


def _arrays(part: str, layers: Sequence[Layer]) -> dict[str, Array]:
    return {
        f"{part}.{index}.{name}": array
        for index, layer in enumerate(layers)
        for name, array in zip(("weight", "bias"), layer, strict=True)
    }


def _chain(arrays: Mapping[str, Array], part: str) -> list[Layer]:
    number = sum(name.startswith(f"{part}.") for name in arrays) // 2
    return [(arrays[f"{part}.{index}.weight"], arrays[f"{part}.{index}.bias"]) for index in range(number)]


def _packed(arrays: Mapping[str, Array]) -> bytes:
    content = io.BytesIO()
    np.savez(content, allow_pickle=False, **{name: np.ascontiguousarray(a) for name, a in arrays.items()})
    return content.getvalue()


def _unpacked(content: bytes, where: str) -> dict[str, Array]:
    try:
        with np.load(io.BytesIO(content), allow_pickle=False) as file:
            return {name: np.ascontiguousarray(file[name], np.float32) for name in file.files}
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise ArtifactError(f"{where} cannot be read: {error}. Run `recmill export` again.") from None
