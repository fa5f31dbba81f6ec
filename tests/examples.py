"""How many random examples a property is tried with. Each run of the suite draws others, so a few are enough for one.

`RECMILL_EXAMPLES=10 make test` tries ten times as many.
"""

from __future__ import annotations

import os
from typing import Any

from hypothesis import settings

FACTOR = float(os.environ.get("RECMILL_EXAMPLES", "1"))


def examples(number: int, **options: Any) -> settings:
    return settings(max_examples=max(1, round(number * FACTOR)), deadline=None, **options)
