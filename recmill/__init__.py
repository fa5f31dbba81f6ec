"""recmill: from raw click logs to a served recommender."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection
    from pathlib import Path

    from recmill.stages.serve.recommender import Recommender

__version__ = "0.1.0"


def open_bundle(
    path: str | Path, features: str | None = None, trust_code: Collection[str] = ()
) -> Recommender:
    """A recommender from what `recmill export` wrote; `features` is the URL of a store, such as redis://host:6379.

    Functions that its features call are imported only from modules and packages in `trust_code`.
    """
    from recmill.stages.serve.recommender import open_bundle

    return open_bundle(path, features, trust_code)
