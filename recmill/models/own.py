"""Users' own models and losses, which recipes name as package.module:name."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from recmill.errors import FeatureError

Loss = Callable[[Tensor, Tensor], Tensor]  # logits and labels to elementwise losses of the same shape


def own_model(path: str, key: str = "ranking.model") -> Callable[..., nn.Module]:
    """A module class, created and called like ours (see docs/models.md)."""
    model = _imported(path, key)
    if not (isinstance(model, type) and issubclass(model, nn.Module)):
        raise FeatureError(f'{key} "{path}" is not a torch.nn.Module class.')
    return model


def own_loss(path: str, key: str = "ranking.loss") -> Loss:
    """A function of logits and labels."""
    loss = _imported(path, key)
    if not callable(loss):
        raise FeatureError(f'{key} "{path}" is no function.')
    return loss  # type: ignore[no-any-return]


def _imported(path: str, key: str) -> Any:
    module, _, name = path.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except ImportError as error:
        raise FeatureError(
            f'{key} "{path}" cannot be imported: {error}. Is it installed, or in the current directory?'
        ) from error
    except AttributeError:
        raise FeatureError(f'{key} "{path}": module {module} has no {name}.') from None
