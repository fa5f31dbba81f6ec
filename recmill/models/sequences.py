"""Lists whose elements keep their vectors: how models receive them, and attention over them.

Shapes: B rows, L elements of the longest list, N elements of all lists, D embedding dim, H heads.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from recmill.dataset.batch import Array


class ListVectors(NamedTuple):
    """An unpooled list feature: the vectors of each row's list, oldest first, and a mask of the real elements."""

    vectors: Tensor  # [B, L, D]
    mask: Tensor  # [B, L], 1 for each element, 0 for padding


def pad_lists(rows_ND: Tensor, lengths_B: Array) -> ListVectors:
    """Pad concatenated vectors of lists with zeros to the longest list."""
    length = int(lengths_B.max(initial=1))
    is_real_BL = np.arange(length) < lengths_B[:, None]
    indices_N = torch.from_numpy(np.flatnonzero(is_real_BL))
    padded = rows_ND.new_zeros((is_real_BL.size, rows_ND.shape[1])).index_copy(0, indices_N, rows_ND)
    mask_BL = torch.from_numpy(is_real_BL.astype(np.float32))
    return ListVectors(padded.view(len(lengths_B), length, -1), mask_BL)
