"""Files that a sequence of names leaves out are named; names that are no sequence are left alone."""

from __future__ import annotations

import pytest

from recmill.logs.sequence import missing_names


@pytest.mark.parametrize(
    ("names", "missing"),
    [
        (["day_0.gz", "day_1.gz", "day_3", "day_4.zst"], ["day_2"]),
        (["part-00008-a.parquet", "part-00011-a.parquet"], ["part-00009-a.parquet", "part-00010-a.parquet"]),
        (["2024-02-28.tsv", "2024-03-02.tsv"], ["2024-02-29.tsv", "2024-03-01.tsv"]),
        (["20231230", "20240102"], ["20231231", "20240101"]),
        (["d=1/p-0", "d=1/p-2", "d=3/p-0"], ["d=1/p-1", "d=2/p-0"]),
        (["day_0", "day_1", "day_2"], []),
        (["user_5", "user_7000"], []),
        (["part-00000-3f2a9c0d", "part-00002-77b1e2"], []),
        (["events.tsv"], []),
    ],
)
def test_what_a_sequence_leaves_out(names: list[str], missing: list[str]) -> None:
    assert missing_names(names) == missing
