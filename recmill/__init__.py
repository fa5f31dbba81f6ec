"""recmill: from raw click logs to a served recommender."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from recmill.serve.recommender import Recommender

__version__ = "0.1.0"


def open_bundle(path: str | Path, features: str | None = None) -> Recommender:
    """A recommender from what `recmill export` wrote; `features` is the URL of a store, such as redis://host:6379."""
    from recmill.serve.recommender import open_bundle

    return open_bundle(path, features)
