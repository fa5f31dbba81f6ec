"""The first sentence of a report: is the served list better than what is simpler?"""

from typing import Any

import pytest

from recmill.reporting.html.served import served_verdict


def served(popular: tuple[float, float], best: tuple[float, float]) -> dict[str, Any]:
    return {
        "users": 1200,
        "split": "test",
        "baselines": {
            "popular": {"recall@10": 0.05},
            "item-kNN": {"recall@10": 0.06},
            "EASE": {"recall@10": 0.08},
        },
        "differences": {"popular": popular, "item-kNN": (0.0, 0.0), "EASE": best},
    }


@pytest.mark.parametrize(
    ("popular", "best", "sentence"),
    [
        (
            (0.02, 0.005),
            (-0.01, 0.004),
            "The served list is better than the most popular items by 40% ± 10%, and worse than EASE by 12% ± 5%: "
            "recall@10 for 1,200 users of test.",
        ),
        (
            (0.03, 0.005),
            (0.001, 0.004),
            "The served list is better than the most popular items by 60% ± 10%, and as good as EASE within what "
            "can be told (+0.0010 ± 0.0040): recall@10 for 1,200 users of test.",
        ),
    ],
)
def test_a_verdict_compares_beyond_the_interval_only(
    popular: tuple[float, float], best: tuple[float, float], sentence: str
) -> None:
    assert served_verdict(served(popular, best)) == sentence
