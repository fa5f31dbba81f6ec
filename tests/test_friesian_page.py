"""Every row of docs/coming-from-friesian.md is run: its code comes from the page, its data and answers from here."""

from __future__ import annotations

import re
import shlex
import sys
import tomllib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from recmill.cli import main
from recmill.dataset.table import Table
from recmill.recipe.load import recipe_from_dict
from recmill.stages.prepare.prepare import prepare

PAGE = Path(__file__).parent.parent / "docs" / "coming-from-friesian.md"

# Section by section, as in Friesian's own reference.
API = re.findall(
    r"\S+",
    """
schema columns dtypes compute to_spark_df to_pandas to_list to_dict collect size broadcast select
drop limit filter distinct sample repartition coalesce get_partition_row_number fillna dropna
fill_median median clip log add cast rename merge_cols get_stats min max random_split split
ordinal_shuffle_partition concat subtract intersect drop_duplicates append_column col sort order_by
show cache uncache write_parquet write_csv

FeatureTable.read_parquet read_json read_csv read_text from_pandas gen_string_idx encode_string
category_encode filter_by_frequency hash_encode cross_hash_encode cross_columns one_hot_encode
min_max_scale transform_min_max_scale target_encode encode_target difference_lag cut_bins
add_negative_samples add_hist_seq add_neg_hist_seq mask pad add_value_features gen_reindex_mapping
reindex apply join group_by get_vocabularies sample_listwise string_embed featuretable_to_xshards

StringIndex.read_parquet StringIndex.from_dict StringIndex.to_dict StringIndex.write_parquet
StringIndex.cast TargetCode.cat_col TargetCode.out_target_mean TargetCode.rename
""",
)

# One small shop, used by every check.
LOG = pl.DataFrame(
    {
        "user": ["ann", "ann", "bob", "ann"],
        "item": ["book", "pen", "book", "cup"],
        "price": [4.0, 1.0, None, 2.0],
        "time": [1, 2, 3, 4],
        "tags": ["red new", "red", "", "7"],
        "clicked": [1, 0, 1, 0],
    }
)
TYPES = {"user": "text", "item": "text", "price": "float", "time": "int", "tags": "text", "clicked": "int"}
ITEMS = pl.DataFrame({"item": ["book", "cup"], "brand": ["B", "C"]})
BASE: dict[str, Any] = {
    "name": "shop",
    "log": {
        "files": ["log.parquet"],
        "format": "parquet",
        "user": "user",
        "item": "item",
        "columns": [{"name": name, "type": kind} for name, kind in TYPES.items()],
    },
    "labels": [{"name": "click", "columns": "clicked"}],
    "table": {"keep": list(TYPES)},
}
ITEMS_TABLE = {
    "files": ["items.parquet"],
    "format": "parquet",
    "columns": [{"name": "item", "type": "text"}, {"name": "brand", "type": "text"}],
}


def page_rows() -> dict[str, str]:
    """Method -> code of its row."""
    found: dict[str, str] = {}
    for line in PAGE.read_text().splitlines():
        if cells := re.match(r"\| (`.+?`) \| `(.+?)` \| ", line):
            found.update(dict.fromkeys(re.findall(r"`(.+?)`", cells[1]), cells[2]))
    return found


class Shop:
    """A place where fragments of recipes and lines of Polars can be tried."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.num_tables = 0
        LOG.write_parquet(folder / "log.parquet")
        LOG.write_ndjson(folder / "log.jsonl")
        LOG.write_csv(folder / "log.csv")
        (folder / "log.txt").write_text("one line\nanother\n")
        ITEMS.write_parquet(folder / "items.parquet")

    def prepare(self, recipe: Mapping[str, Any]) -> Table:
        self.num_tables += 1
        into = self.folder / f"table-{self.num_tables}"
        return prepare(recipe_from_dict({**BASE, **recipe}), str(self.folder), into).table

    def feature(self, code: str, *columns: str, more: Any = ()) -> list[Any]:
        """`steps = ...` on columns: the feature of each row."""
        features = [{"name": "f", "columns": list(columns), **tomllib.loads(code)}, *more]
        return self.prepare({"features": features}).scan().collect()["f"].to_list()

    def rows(self, code: str, *keep: str) -> list[Any]:
        """A fragment of a recipe: raw columns of the training rows that come out."""
        return self.table(code, *keep).scan().select(f"raw_{name}" for name in keep).collect().rows()

    def table(self, code: str, *keep: str) -> Table:
        fragment = tomllib.loads(code)
        if "brand" in code or "items" in code:
            fragment["tables"] = {"items": ITEMS_TABLE}
        if "log" in fragment:
            fragment["log"] = {"columns": BASE["log"]["columns"], **fragment["log"]}
        fragment["table"] = {"keep": list(keep), **fragment.get("table", {})}
        features = [{"name": "clock", "columns": "time"}]
        if "line" in keep:
            features, fragment["labels"] = [{"columns": "line", "steps": ["vocabulary"]}], []
        return self.prepare({"features": features, **fragment})

    def python(self, code: str, **names: Any) -> Any:
        """A line of Python with the names that the page introduces; lazy frames are collected."""
        features = [
            {"columns": "user", "steps": ["vocabulary"]},
            {"columns": "item", "steps": [{"vocabulary": {"named": "item"}}]},
            {"columns": "price", "steps": ["min_max"]},
            {"name": "code", "columns": "item", "steps": [{"target": "click"}]},
        ]
        table = self.prepare({"features": features, "table": {}})
        rows = table.scan().select("user", "item", "price")
        known = {
            "pl": pl,
            "Table": Table,
            "path": table.path,
            "rows": rows,
            "plan": table.plan,
            "other": rows.head(1),
            **names,
        }
        found = eval(code, known)
        return found.collect() if isinstance(found, pl.LazyFrame) else found


@pytest.fixture
def shop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Shop]:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(
        "import polars as pl\n"
        "def shout(texts): return texts.str.to_uppercase()\n"
        "def embed(texts): return pl.Series([[float(len(text)), 1.0] for text in texts])\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    yield Shop(tmp_path)
    sys.modules.pop("mine", None)


Check = Callable[[Shop, str], None]
CHECKS: dict[str, Check] = {}


def check(*names: str) -> Callable[[Check], Check]:
    def register(function: Check) -> Check:
        CHECKS.update(dict.fromkeys(names, function))
        return function

    return register


def python_gives(
    name: str, expected: Any, get: Callable[[Any], Any] = lambda found: found, **names: Any
) -> None:
    def run(shop: Shop, code: str) -> None:
        assert get(shop.python(code, **names)) == expected

    CHECKS[name] = run


def feature_gives(name: str, columns: str, expected: list[Any]) -> None:
    def run(shop: Shop, code: str) -> None:
        assert shop.feature(code, *columns.split()) == pytest.approx(expected)

    CHECKS[name] = run


def rows_give(name: str, keep: str, expected: list[Any]) -> None:
    def run(shop: Shop, code: str) -> None:
        assert shop.rows(code, *keep.split()) == expected

    CHECKS[name] = run


# Tables. Prepared rows: users ann 1, bob 2; items book 1, cup 2, pen 3; prices scaled to 0..1, missing is 0.
PREPARED = [(1, 1, 1.0), (1, 3, 0.0), (2, 1, 0.0), (1, 2, pytest.approx(1 / 3))]


def tuples(frame: pl.DataFrame) -> list[Any]:
    return frame.rows()


python_gives("schema", {"user": pl.Int32, "item": pl.Int32, "price": pl.Float32}, dict)
python_gives("columns", ["user", "item", "price"])
python_gives("dtypes", [pl.Int32, pl.Int32, pl.Float32])
python_gives("compute", PREPARED, tuples)
python_gives("to_spark_df", ["shard-00000-000.parquet"], lambda files: [file.name for file in files])
python_gives("to_pandas", [1, 3, 1, 2], lambda frame: frame["item"].tolist())
python_gives("to_list", [1, 3, 1, 2])
python_gives("to_dict", [1, 1, 2, 1], lambda columns: columns["user"])
python_gives("collect", {"user": 1, "item": 3, "price": 0.0}, lambda found: found[1])
python_gives("size", 4)
python_gives("select", ["user", "item"], lambda frame: frame.columns)
python_gives("drop", ["user", "item"], lambda frame: frame.columns)
python_gives("limit", PREPARED[:2], tuples)
python_gives("distinct", PREPARED, tuples)
python_gives("get_partition_row_number", [4])
python_gives("median", [(pytest.approx(1 / 6),)], tuples)
python_gives("get_stats", [(0.0, 1.0, pytest.approx(1 / 3))], tuples)
python_gives("min", [(0.0,)], tuples)
python_gives("max", [(1.0,)], tuples)
python_gives("concat", [*PREPARED, PREPARED[0]], tuples)
python_gives("subtract", PREPARED[1:], tuples)
python_gives("intersect", PREPARED[:1], tuples)
python_gives("append_column", [1, 1, 1, 1], lambda frame: frame["one"].to_list())
python_gives("col", ["price"], lambda column: column.meta.root_names())
for _name in ("sort", "order_by"):
    python_gives(_name, [1, 2], lambda frame: frame["item"].to_list()[:2])
for _name in ("cache", "uncache"):
    python_gives(_name, PREPARED, tuples)

rows_give("broadcast", "item brand", [("book", "B"), ("pen", None), ("book", "B"), ("cup", "C")])
rows_give("filter", "price", [(4.0,), (2.0,)])
rows_give("dropna", "price", [(4.0,), (1.0,), (2.0,)])
rows_give("drop_duplicates", "user price", [("ann", 1.0), ("bob", None)])
rows_give("split", "time", [(1,), (2,)])

feature_gives("fillna", "price", [4.0, 1.0, 0.0, 2.0])
feature_gives("fill_median", "price", [4.0, 1.0, 2.0, 2.0])
feature_gives("clip", "time", [1.0, 2.0, 2.0, 2.0])
feature_gives("log", "clicked", [0.6931472, 0.0, 0.6931472, 0.0])
feature_gives("add", "time", [2.5, 3.5, 4.5, 5.5])
feature_gives("cast", "tags", [0.0, 0.0, 0.0, 7.0])


@check("sample")
def _(shop: Shop, code: str) -> None:
    kept = shop.rows(code, "time")
    assert kept == shop.rows(code, "time")
    assert 0 < len(kept) < 4


@check("repartition", "coalesce")
def _(shop: Shop, code: str) -> None:
    (shop.folder / "shop.toml").write_text(
        'name = "shop"\nfeatures = [{ columns = "time" }]\n'
        '[log]\nfiles = ["log.parquet"]\nformat = "parquet"\ncolumns = [{ name = "time", type = "int" }]\n'
    )
    arguments = (
        code.replace("RECIPE", "shop.toml")
        .replace("--data DIR", "--data .")
        .replace("--into DIR", "--into out")
    )
    assert main(shlex.split(arguments)[1:]) == 0
    assert Table.open("out").scan().collect()["time"].to_list() == [1.0, 2.0, 3.0, 4.0]


@check("rename")
def _(shop: Shop, code: str) -> None:
    assert shop.prepare(tomllib.loads(code)).scan().collect()["cost"].to_list() == [4.0, 1.0, 0.0, 2.0]


@check("merge_cols")
def _(shop: Shop, code: str) -> None:
    assert shop.feature(code, "price", "time") == [[4.0, 1.0], [1.0, 2.0], [0.0, 3.0], [2.0, 4.0]]


@check("random_split")
def _(shop: Shop, code: str) -> None:
    table = shop.table(code, "user")
    users = [
        set(table.scan(split).collect()["raw_user"]) for split in ("train", "eval") if table.num_rows(split)
    ]
    assert set.union(*users) == {"ann", "bob"}
    assert sum(map(len, users)) == 2


@check("ordinal_shuffle_partition")
def _(shop: Shop, code: str) -> None:
    assert sorted(shop.rows(code, "time")) == [(1,), (2,), (3,), (4,)]


@check("show")
def _(shop: Shop, code: str) -> None:
    assert shop.python(code) is None


@check("write_parquet")
def _(shop: Shop, code: str) -> None:
    shop.python(code)
    assert pl.read_parquet("out.parquet").rows() == PREPARED


@check("write_csv")
def _(shop: Shop, code: str) -> None:
    shop.python(code)
    assert Path("out.csv").read_text().splitlines()[:2] == ["user,item,price", "1,1,1.0"]


# Feature tables

for _name in ("FeatureTable.read_parquet", "read_json", "read_csv"):
    rows_give(_name, "user time", [("ann", 1), ("ann", 2), ("bob", 3), ("ann", 4)])
rows_give("read_text", "line", [("one line",), ("another",)])
rows_give("difference_lag", "price_lag1", [(None,), (-3.0,), (None,), (1.0,)])
rows_give("add_hist_seq", "item item_history", [("pen", ["book"]), ("cup", ["book", "pen"])])
rows_give("join", "brand", [("B",), (None,), ("B",), ("C",)])

feature_gives("gen_string_idx", "item", [1, 0, 1, 0])
feature_gives("category_encode", "tags", [1, 1, 0, 2])
feature_gives("min_max_scale", "time", [0.0, 1 / 3, 2 / 3, 1.0])
feature_gives("cut_bins", "price", [2, 2, 0, 2])
feature_gives("gen_reindex_mapping", "item", [0, 0, 0, 0])
feature_gives("reindex", "user", [1, 1, 0, 1])
feature_gives("apply", "user", [1, 1, 2, 1])
feature_gives("group_by", "user", [7 / 3, 7 / 3, 0.0, 7 / 3])
feature_gives("StringIndex.from_dict", "item", [1, 2, 1, 0])

python_gives("filter_by_frequency", [(1,)], tuples)
python_gives("get_vocabularies", ["book", "cup", "pen"])
python_gives(
    "featuretable_to_xshards", ["shard-00000-000.parquet"], lambda files: [file.name for file in files]
)
python_gives("StringIndex.read_parquet", [(1, "book", 2), (2, "cup", 1), (3, "pen", 1)], tuples)
python_gives("StringIndex.to_dict", {"book": 1, "cup": 2, "pen": 3})
python_gives("StringIndex.cast", [pl.String, pl.Int32], lambda frame: frame.dtypes)
python_gives("TargetCode.cat_col", ["book", "cup", "pen"], list)
python_gives("TargetCode.out_target_mean", 0.5)
NEW = pl.DataFrame({"item": ["book", "new"], "price": [2.5, 9.0]})
python_gives("transform_min_max_scale", [0.5, 1.0], lambda frame: frame["price"].to_list(), new_rows=NEW)
# "book" has 2 clicks of 2, smoothed by 20 rows of the mean, 0.5.
python_gives(
    "encode_target", [pytest.approx(12 / 22), 0.5], lambda frame: frame["code"].to_list(), new_rows=NEW
)


@check("from_pandas")
def _(shop: Shop, code: str) -> None:
    shop.python(code, frame=LOG.head(2).to_pandas())
    assert shop.rows("", "time") == [(1,), (2,)]


@check("encode_string")
def _(shop: Shop, code: str) -> None:
    rare = {"name": "item", "columns": ["item"], "steps": [{"vocabulary": {"named": "item", "min_count": 2}}]}
    assert shop.feature(code, "item", more=[rare]) == [1, 0, 1, 0]


@check("hash_encode")
def _(shop: Shop, code: str) -> None:
    book, pen, again, cup = shop.feature(code, "item")
    assert book == again
    assert {book, pen, cup} <= set(range(1, 101))


@check("cross_hash_encode", "cross_columns")
def _(shop: Shop, code: str) -> None:
    found = shop.feature(code, "user", "item")
    assert set(found) <= set(range(1, 101))
    assert found != shop.feature(code, "item", "user")


@check("one_hot_encode")
def _(shop: Shop, code: str) -> None:
    assert shop.feature(code, "user") == [[0, 1, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0], [0, 1, 0, 0]]


@check("target_encode")
def _(shop: Shop, code: str) -> None:
    found = shop.feature(code, "item")
    assert all(0 <= value <= 1 for value in found)


@check("add_negative_samples")
def _(shop: Shop, code: str) -> None:
    table = shop.table(code, "item", "clicked")
    found = table.scan().collect()
    items = found["raw_item"].to_list()
    assert found["click"].to_list() == [1, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0]
    assert all(items[row] != items[row // 3 * 3] for row in range(12) if row % 3)


@check("add_neg_hist_seq")
def _(shop: Shop, code: str) -> None:
    found = shop.rows(code, "item_history_negatives")
    assert [len(negatives) for (negatives,) in found] == [0, 2, 0, 4]
    assert "book" not in found[1][0]


@check("mask")
def _(shop: Shop, code: str) -> None:
    assert shop.feature(code, "tags") == [[1, 1, 0], [1, 0, 0], [0, 0, 0], [1, 0, 0]]


@check("pad")
def _(shop: Shop, code: str) -> None:
    assert shop.feature(code, "tags") == [[1, 3, 0], [1, 0, 0], [0, 0, 0], [2, 0, 0]]


@check("add_value_features")
def _(shop: Shop, code: str) -> None:
    assert shop.rows(code, "brand_history") == [([],), (["B"],), ([],), (["B", None],)]


@check("sample_listwise")
def _(shop: Shop, code: str) -> None:
    lists = pl.DataFrame({"a": [[1, 2, 3], [4, 5]], "b": [[10, 20, 30], [40, 50]]})
    found = shop.python(code, lists=lists)
    assert found["a"].list.len().to_list() == [2, 2]
    assert found.select(pl.col("a").list.eval(pl.element() * 10) == pl.col("b")).to_series().all()


@check("string_embed")
def _(shop: Shop, code: str) -> None:
    assert shop.feature(code, "item") == [[4.0, 1.0], [3.0, 1.0], [4.0, 1.0], [3.0, 1.0]]


@check("StringIndex.write_parquet")
def _(shop: Shop, code: str) -> None:
    shop.python(code, folder=shop.folder / "saved")
    step = f'steps = [{{ vocabulary = {{ named = "item", extend = "{shop.folder}/saved" }} }}]'
    assert shop.feature(step, "item") == [1, 3, 1, 2]


@check("TargetCode.rename")
def _(shop: Shop, code: str) -> None:
    assert "ctr" in shop.prepare(tomllib.loads(code)).scan().collect_schema()


def test_the_page_covers_the_whole_api() -> None:
    assert sorted(page_rows()) == sorted(API)


def test_every_row_has_a_check_and_every_check_a_row() -> None:
    assert sorted(CHECKS) == sorted(page_rows())


@pytest.mark.parametrize("name", sorted(page_rows()))
def test_the_code_on_the_page_does_what_it_says(name: str, shop: Shop) -> None:
    CHECKS[name](shop, page_rows()[name])
