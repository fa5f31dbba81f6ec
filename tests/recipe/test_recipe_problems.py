"""What the loader says when a recipe is wrong: key path, what was found, what was expected."""

# ruff: noqa: E501 -- one case is one line: what is written, and what is said about it

from __future__ import annotations

import pickle
from typing import Any

import pytest
from small_recipe import TREE, feature, load, problems

from recmill.errors import RecipeError

JOIN = {
    "users": {
        "files": ["u.tsv"],
        "columns": [{"name": "user", "type": "text"}, {"name": "age", "type": "int"}],
    }
}
RANKING = {"model": "dlrm", "label": "clicked", "bottom": [16]}
WIDE = {"model": "wide_deep", "label": "clicked"}
TREES = {"model": "trees", "label": "clicked", "trees": {"features": "n1"}}


def log(**keys: Any) -> dict[str, Any]:
    return {**TREE["log"], **keys}


def test_every_problem_is_reported_at_once() -> None:
    assert problems(
        nmae="x",
        name=3,
        split={"by": "tail", "held_out": 2, "order": "x"},
        features=[
            {"columns": "user", "steps": ["vocabulari"], "dim": "8"},
            {"columns": "n1..n3", "dim": -8},
            {"columns": "n7"},
        ],
        ranking={**RANKING, "train": {"batch_size": 0, "target": "auc = 1"}},
    ) == [
        'nmae is not a known key; did you mean "name"?',
        "name must be text, got 3",
        'features[0].steps[0] has no step "vocabulari"; did you mean "vocabulary"?',
        'features[0].dim must be a positive integer, got "8"',
        "features[1].dim must be a positive integer, got -8",
        "split.held_out must be a number above 0 and below 1, got 2",
        "ranking.train.batch_size must be a positive integer, got 0",
        'split.order has no meaning for by = "tail"; remove it',
        "features[1].dim has no meaning for numbers; only ids and keys have embeddings",
        'features[2] reads column "n7", but the rows have no such column; known: click, item, n1, n2, n3, time, user, words',
        'ranking.train.target must look like "auc >= 0.80", got "auc = 1"',
    ]


def test_an_error_names_its_source_on_every_line_and_can_be_pickled() -> None:
    with pytest.raises(RecipeError) as caught:
        load(name=3, features=[])
    copy = pickle.loads(pickle.dumps(caught.value))
    assert (
        str(copy) == "small.toml: name must be text, got 3\nsmall.toml: features is empty; name at least one"
    )


def test_what_follows_from_a_broken_section_is_not_reported() -> None:
    assert problems(log=log(columns=[{"name": "user", "type": "txt"}])) == [
        'log.columns[0].type must be one of int, float, text, hex, bool, time, got "txt"; did you mean "text"?'
    ]
    assert problems(labels=None, label=[{"name": "clicked", "columns": "click"}], ranking=RANKING) == [
        'label is not a known key; did you mean "labels"?'
    ]


def test_one_problem_of_a_range_is_reported_once() -> None:
    assert problems(features=feature({"split": ","}, columns="n1..n3")) == [
        "features[0].steps[0].split needs text, but gets numbers"
    ]


def test_a_problem_of_some_columns_names_them() -> None:
    assert problems(features=feature({"fill": 0}, columns="n1..n2, words, user")) == [
        "features[0].steps[0].fill replaces missing text by 0 (for words, user)"
    ]


def test_an_index_is_the_entry_in_the_file_also_after_ranges() -> None:
    columns = [{"name": "a1..a5", "type": "int"}, {"name": "b", "type": "int", "allowed": ["x"]}]
    found = problems(log={"files": "a", "columns": columns}, labels=[], features=[
        {"columns": "a1..a5"},
        {"columns": "b", "steps": ["log", {"clip": {"min": 2, "max": 1}}], "name": "c"},
    ])  # fmt: skip
    assert found == [
        'log.columns[1].allowed has "x", but the column\'s type is int',
        "features[1].steps[1].clip.min must be below max, got 2.0 and 1.0",
    ]


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (None, "nothing"), (True, "true"), (2**70, "1180591620717411303424"), (10**400, "a number of 1329 bits"),
        ([1, [2]], "[1, [...]]"), ({"a": 1}, "{ a = ... }"), (float("nan"), "nan"), ("x" * 100, f'"{"x" * 76}...'),
    ],
)  # fmt: skip
def test_what_was_found_is_shown_but_never_at_length(value: Any, shown: str) -> None:
    (problem,) = problems(features=feature({"hash": {"buckets": value}}, columns="user"))
    assert problem.endswith(f"got {shown}")
    assert problem.startswith("features[0].steps[0].hash.buckets must be")


@pytest.mark.parametrize(
    ("section", "problem"),
    [
        ({"files": []}, "log.files is empty; name at least one file or pattern"),
        ({"columns": []}, "log.columns is empty; name the columns of the file"),
        ({"separator": ""}, "log.separator is empty"),
        ({"separator": "\n"}, "log.separator must not hold line ends"),
        ({"quote": "''"}, "log.quote must be one ASCII character or empty, got \"''\""),
        ({"separator": '"', "quote": '"'}, "log.quote and separator must differ"),
        (
            {"format": "parquet", "header": True},
            'log.header has no meaning for format = "parquet"; remove it',
        ),
        (
            {"format": "jsonl", "separator": ","},
            'log.separator has no meaning for format = "jsonl"; remove it',
        ),
        ({"format": "csv"}, 'log.format must be one of delimited, parquet, jsonl, got "csv"'),
        (
            {
                "header": True,
                "columns": [*TREE["log"]["columns"], {"name": "i1..i3", "type": "int", "in_file": "I1..I2"}],
            },
            "log.columns[5].in_file has 2 names, but name has 3",
        ),
        (
            {
                "header": False,
                "columns": [*TREE["log"]["columns"], {"name": "shop", "type": "text", "in_file": "Shop"}],
            },
            "log.columns[5].in_file needs log.header = true: without it the file has no names",
        ),
        ({"user": "usr"}, 'log.user is "usr", but the log has no such column; did you mean "user"?'),
        ({"user": "n1"}, 'log.user is "n1", which holds numbers; expected whole numbers or text'),
        ({"time": "words"}, 'log.time is "words", which holds text; expected numbers'),
        ({"user": "item"}, 'log.user and log.item are both "item"'),
    ],
)
def test_log(section: dict[str, Any], problem: str) -> None:
    assert problem in problems(log=log(**section))


@pytest.mark.parametrize(
    ("column", "problem"),
    [
        ({"name": "user", "type": "int"}, 'log.columns has "user" more than once'),
        ({"name": "__x", "type": "int"}, 'log.columns[5].name is "__x"; names that begin with __ are reserved'),
        ({"name": "", "type": "int"}, "log.columns[5].name is empty"),
        ({"name": "a3..a1", "type": "int"}, 'log.columns[5].name has "a3..a1", which counts down; write the lower number first'),
        ({"name": "a1..b3", "type": "int"}, 'log.columns[5].name has "a1..b3", which is no range; write it as i1..i13'),
        ({"name": "a1..a99999", "type": "int"}, 'log.columns[5].name has "a1..a99999", which stands for more than 10,000 names'),
        ({"name": "x", "type": "int", "allowed": [True]}, "log.columns[5].allowed has true, but the column's type is int"),
        ({"name": "x", "type": "hex", "allowed": ["ff", 3, "xy"]}, 'log.columns[5].allowed has "xy", but the column\'s type is hex'),
        ({"name": "x", "type": "int", "allowed": []}, "log.columns[5].allowed is empty; no row would be good"),
        ({"name": "x", "type": "int", "off": "user"}, 'log.columns[5].off is not a known key; did you mean "of"?'),
        ("x", 'log.columns[5] must be a table, got "x"'),
    ],
)  # fmt: skip
def test_columns(column: Any, problem: str) -> None:
    assert problems(log=log(columns=[*TREE["log"]["columns"], column])) == [problem]


NEGATIVES = {"negatives": {"label": "click"}}
HISTORY = {"history": {"columns": ["item"], "by": "user", "order": "time"}}


@pytest.mark.parametrize(
    ("rows", "problem"),
    [
        ([{"filter": "1 = 1"}], 'rows[0].filter.sql is "1 = 1", which reads no column; the rows have: time, user, item, n1, n2, n3, words, click'),
        ([{"filter": "words = 'click'"}, {"filter": "'click' = ''"}], 'rows[1].filter.sql is "\'click\' = \'\'", which reads no column; the rows have: time, user, item, n1, n2, n3, words, click'),
        ([{"filter": "words > 3"}], 'rows[0].filter.sql, at character 9: column "words" is text and 3 is int; they cannot be compared'),
        ([{"filter": "n1 in (select 1)"}], "rows[0].filter.sql, at character 8: expected a number, a text in single quotes, true, false or null, found select; there are no subqueries"),
        ([{"sample": 0}], "rows[0].sample.fraction must be a number above 0 and at most 1, got 0"),
        ([{"smaple": 0.5}], 'rows[0] has no row operation "smaple"; did you mean "sample"?'),
        ([{"sample": 0.5, "filter": "n1 > 0"}], "rows[0] must name one row operation, as text or as a table with one key; got { sample = ..., filter = ... }"),
        ([{"dedupe": "user"}], 'rows[0].dedupe must be a table of parameters (by, order, keep), got "user"'),
        ([{"dedupe": {"by": [], "order": "time"}}], "rows[0].dedupe.by is empty; name at least one column"),
        ([{"dedupe": {"by": "n1", "order": "time"}}], 'rows[0].dedupe.by needs whole numbers or text, but column "n1" holds numbers'),
        ([{"lag": {"columns": "words", "by": "user", "order": "time"}}], 'rows[0].lag.columns needs numbers, but column "words" holds text'),
        ([HISTORY, HISTORY], 'rows[1].history would add column "item_history", which the rows already have'),
        ([NEGATIVES, HISTORY], "rows[1].history comes after rows[0].negatives, which needs the split to be made; put it before"),
        ([{"history": {**HISTORY["history"], "packed": True, "last": 2}}], "rows[0].history.last has no meaning beside packed, which chooses rows itself; remove it"),
        ([NEGATIVES, NEGATIVES], "rows has negatives more than once; raise per_row of the first instead"),
        ([{"negatives": {"label": "click", "label_value": "no"}}], 'rows[0].negatives.label_value is "no", but column "click" holds whole numbers'),
        ([{"history_negatives": {"history": "item"}}], 'rows[0].history_negatives.history needs lists of items, but column "item" holds text'),
        ([{"join": {"table": "users", "on": "user"}}], 'rows[0].join.table is "users", but the recipe has no [tables.users]'),
        ([{"join": "users"}], "rows[0].join.on is missing"),
    ],
)  # fmt: skip
def test_rows(rows: list[Any], problem: str) -> None:
    assert problems(rows=rows) == [problem]


def test_items_cannot_be_drawn_without_an_item_column() -> None:
    assert problems(log=log(item=None), rows=[NEGATIVES]) == [
        "rows[0].negatives draws items, but log.item does not name the item column"
    ]


def test_side_tables() -> None:
    join = {"join": {"table": "users", "on": "user"}}
    assert problems(tables=JOIN, rows=[join]) == []
    assert problems(tables=JOIN) == [
        "tables.users is never joined; add a join to [[rows]] or remove the table"
    ]
    twice = {
        "users": {**JOIN["users"], "columns": [*JOIN["users"]["columns"], {"name": "n1", "type": "int"}]}
    }
    assert problems(tables=twice, rows=[join]) == [
        'rows[0].join would add column "n1", which the rows already have; rename it in tables.users.columns'
    ]
    numbers = {"users": {**JOIN["users"], "columns": [{"name": "user", "type": "int"}]}}
    assert problems(tables=numbers, rows=[join]) == [
        'rows[0].join.on joins text with int; give column "user" one type on both sides'
    ]


@pytest.mark.parametrize(
    ("split", "problem"),
    [
        ({}, "split.by is missing"),
        ({"by": "tail"}, 'split.held_out is missing; split by "tail" needs the share of rows to hold out'),
        ({"by": "tail", "held_out": 0.1, "seed": 3}, 'split.seed has no meaning for by = "tail"; remove it'),
        ({"by": "tail", "held_out": 0.1, "column": "user"}, 'split.column has no meaning for by = "tail"; remove it'),
        ({"by": "files"}, 'split.held_out_files is missing; split by "files" needs the names or patterns to hold out'),
        ({"by": "files", "held_out_files": "a", "held_out": 0.1}, 'split.held_out has no meaning for by = "files"; remove it'),
        ({"by": "time", "held_out": 0.1}, 'split.column is missing; split by "time" needs a column'),
        ({"by": "time", "held_out": 0.1, "column": "words"}, 'split.column needs numbers, but column "words" holds text'),
        ({"by": "time", "column": "time", "eval_from": 5, "test_from": 4}, "split.test_from must be above eval_from, got 4.0 and 5.0"),
        ({"by": "time", "column": "time", "eval_from": 5, "halve": True}, "split.halve has no meaning beside eval_from, which says where to cut; remove one of them"),
        ({"by": "time", "column": "time", "held_out": 0.1, "test_from": 5}, "split.eval_from is missing; test_from needs the time at which eval begins"),
        ({"by": "hash", "held_out": 0.1, "column": "n1"}, 'split.column needs whole numbers or text, but column "n1" holds numbers'),
        ({"by": "last", "column": "user"}, 'split.order is missing; split by "last" needs a column to order rows by'),
        ({"by": "last", "column": "user", "order": "time", "halve": True}, 'split.halve has no meaning for by = "last"; remove it'),
    ],
)  # fmt: skip
def test_split(split: dict[str, Any], problem: str) -> None:
    assert problems(split=split) == [problem]


def test_a_split_cannot_read_what_is_drawn_after_it() -> None:
    rows = [HISTORY, {"history_negatives": {"history": "item_history"}}]
    split = {"by": "hash", "held_out": 0.1, "column": "item_history_negatives"}
    assert problems(rows=rows) == []
    assert problems(rows=rows, split=split)[0].startswith(
        'split.column reads column "item_history_negatives", but'
    )


@pytest.mark.parametrize(
    ("entry", "problem"),
    [
        ({}, "features[0].columns is missing"),
        ({"columns": ""}, "features[0].columns is empty; name at least one column"),
        ({"columns": [], "name": "x"}, "features[0].columns is empty; name at least one column"),
        ({"columns": ["n1", 3]}, "features[0].columns[1] must be text, got 3"),
        ({"columns": "n3..n1"}, 'features[0].columns has "n3..n1", which counts down; write the lower number first'),
        ({"columns": "n1", "name": 3}, "features[0].name must be text, got 3"),
        ({"columns": "n1", "name": "__x"}, 'features[0].name is "__x"; names must not be empty or begin with __'),
        ({"columns": "n1", "steps": "log"}, 'features[0].steps must be a list, got "log"'),
        ({"columns": "n1", "steps": [{"log": 1, "fill": 0}]}, "features[0].steps[0] must name one step, as text or as a table with one key; got { log = ..., fill = ... }"),
        ({"columns": "n1", "steps": [{"log": {"at_leats": 1}}]}, 'features[0].steps[0].log.at_leats is not a known key; did you mean "at_least"?'),
        ({"columns": "n1", "steps": [{"log": {"at_least": 0}}]}, "features[0].steps[0].log.at_least must be a number above 0, got 0"),
        ({"columns": "n1", "steps": [{"fill": {}}]}, "features[0].steps[0].fill needs exactly one of value and statistic"),
        ({"columns": "n1", "steps": ["clip"]}, "features[0].steps[0].clip needs min, max or both"),
        ({"columns": "time", "steps": [{"clip": {"max": 1e300}}]}, "features[0].steps[0].clip.max is 1e+300, beyond the 64 bits of whole numbers"),
        ({"columns": "user", "steps": ["vocabulary", "vocabulary"]}, "features[0].steps[1].vocabulary takes ids of the same vocabulary; give each its own name with named"),
        ({"columns": "n1", "steps": [{"buckets": [2, 1]}]}, "features[0].steps[0].buckets.edges must be increasing numbers, got [2.0, 1.0]"),
        ({"columns": "n1", "steps": [{"quantiles": 1}]}, "features[0].steps[0].quantiles.buckets must be a whole number from 2, got 1"),
        ({"columns": "n1", "steps": ["log", "pack"]}, "features[0].steps[1].pack takes the feature's columns, so it must be the first step"),
        ({"columns": "n1", "steps": ["vocabulary"]}, "features[0].steps[0].vocabulary needs whole numbers or text, but gets numbers"),
        ({"columns": "user", "steps": ["vocabulary", {"fill": 0}]}, "features[0].steps[1].fill has nothing to do: ids are never missing"),
        ({"columns": "user"}, "features[0] ends as text; add vocabulary, hash or key as its last step"),
        ({"columns": "user", "steps": [{"hash": 2**31}]}, "features[0].steps[0].hash.buckets must be a whole number from 1 to 2147483646, got 2147483648"),
        ({"columns": "user", "steps": [{"hash": {"buckets": 5, "seed": -1}}]}, "features[0].steps[0].hash.seed must be a whole number from 0, got -1"),
        ({"columns": "user", "steps": [{"map": {}}]}, "features[0].steps[0].map.ids is empty; name at least one value"),
        ({"columns": "user", "steps": [{"lookup": "itme"}]}, "features[0].steps[0].lookup.named is \"itme\", but no vocabulary has that name; no vocabulary has a name"),
        ({"columns": "user", "steps": [{"target": "click"}]}, 'features[0].steps[0].target.label is "click", but there is no such label; did you mean "clicked"?'),
        ({"columns": "user", "steps": [{"aggregate": {"column": "words"}}]}, 'features[0].steps[0].aggregate takes the mean of "words", which is text'),
        ({"columns": "words", "steps": [{"vocabulary": {"keep": "most_frequent"}}]}, 'features[0].steps[0].vocabulary has keep = "most_frequent", which reduces lists, but gets one value a row; add split before it'),
        ({"columns": "words", "steps": [{"split": " "}, {"hash": 5}, {"pad": {"length": 3, "value": 0.5}}]}, "features[0].steps[2].pad.value is 0.5, but the list holds ids"),
        ({"columns": ["n1", "n2"], "name": "x"}, 'features[0].name is "x" for 2 columns; write {column} into it, or begin with a step that combines them (cross, pack, expression, function)'),
        ({"columns": ["n1", "n2"], "steps": ["pack"]}, "features[0].name is missing: what is made of several columns needs a name of its own"),
        ({"columns": "user", "name": "x", "steps": [{"cross": "_"}, "key"]}, "features[0].steps[0].cross needs at least two columns"),
        ({"columns": ["user", "user"], "name": "x", "steps": [{"cross": "_"}, "key"]}, 'features[0].columns has "user" more than once'),
        ({"columns": "n1, n2", "name": "x", "steps": [{"expression": "n1 + 1"}]}, 'features[0].steps[0].expression.sql does not mention column "n2"; remove it from columns, or use it'),
        ({"columns": "n1", "name": "x", "steps": [{"expression": "n1 + n2"}]}, 'features[0].steps[0].expression.sql reads column "n2"; add it to columns'),
        ({"columns": "n1", "name": "x", "steps": [{"function": "mine"}]}, 'features[0].steps[0].function.path must look like package.module:function, got "mine"'),
        ({"columns": "n1", "of": "me"}, 'features[0].of must be one of user, item, context, got "me"'),
        ({"columns": "n1", "name": "clicked"}, 'more than one feature or label is called "clicked"; give each a name of its own'),
        ("n1", 'features[0] must be a table, got "n1"'),
    ],
)  # fmt: skip
def test_features(entry: Any, problem: str) -> None:
    assert problems(features=[entry]) == [problem]


def test_a_vocabulary_without_a_name_cannot_be_looked_up_and_the_error_says_how_to_share_it() -> None:
    assert problems(
        features=[
            {"columns": "user", "steps": ["vocabulary"]},
            {"columns": "item", "steps": [{"lookup": "user"}]},
        ]
    ) == [
        'features[1].steps[0].lookup is "user", the vocabulary of feature "user" alone; to share it, write '
        '{ vocabulary = { named = "user" } } in that feature'
    ]


def test_a_lookup_of_a_name_that_two_vocabularies_have_gets_no_second_advice() -> None:
    assert problems(
        features=[
            {"columns": "user", "steps": ["vocabulary"]},
            {"columns": "item", "steps": [{"vocabulary": {"named": "user"}}]},
            {"columns": "words", "steps": [{"lookup": "user"}]},
        ]
    ) == [
        'features[1].steps[0].vocabulary.named is "user", which is the vocabulary of feature "user"; take another name'
    ]


def test_features_that_share_a_vocabulary_need_equal_parameters() -> None:
    shared = [
        {"columns": "user", "steps": [{"vocabulary": {"named": "all"}}]},
        {"columns": "item", "steps": [{"vocabulary": {"named": "all", "min_count": 2}}]},
    ]
    assert problems(features=shared) == [
        'features[1].steps[0].vocabulary has other parameters than "all" in features[0]; make them the same'
    ]


@pytest.mark.parametrize(
    ("label", "problem"),
    [
        ({"name": "clicked", "columns": "clik"}, 'labels[0] reads column "clik", but the rows have no such column; did you mean "click"?'),
        ({"name": "clicked", "columns": "n1", "steps": ["standardise"]}, "labels[0].steps[0].standardise is fitted to the data; a label must not be"),
        ({"name": "clicked", "columns": "n1", "steps": [{"fill": {"statistic": "mean"}}]}, "labels[0].steps[0].fill is fitted to the data; a label must not be"),
        ({"name": "clicked", "columns": ["n1", "n2"], "steps": ["pack"]}, "labels[0] ends as lists of numbers; a label is one number a row"),
    ],
)  # fmt: skip
def test_labels(label: dict[str, Any], problem: str) -> None:
    assert problems(labels=[label]) == [problem]


@pytest.mark.parametrize(
    ("table", "problem"),
    [
        ({"keep": ["usr"]}, 'table.keep has "usr", but the rows have no such column; did you mean "user"?'),
        ({"keep": ["user", "user"]}, 'table.keep has "user" more than once'),
        ({"order": "log", "seed": 3}, 'table.seed has no meaning for order = "log"; remove it'),
    ],
)
def test_table(table: dict[str, Any], problem: str) -> None:
    assert problems(table=table) == [problem]


@pytest.mark.parametrize(
    ("ranking", "problem"),
    [
        ({**RANKING, "model": "dlmr"}, 'ranking.model is "dlmr"; expected lr, fm, deepfm, wide_deep, dlrm, dcn, masknet, din, bst, shared_bottom, mmoe, ple, esmm, trees, or your own module as package.module:Class; did you mean "dlrm"?'),
        ({**RANKING, "label": "click"}, 'ranking.label is "click", but there is no such label; did you mean "clicked"?'),
        ({**RANKING, "features": "user, itm"}, 'ranking.features has "itm", but there is no such feature; did you mean "item"?'),
        ({**RANKING, "hidden": [8]}, 'ranking.hidden has no meaning for model = "dlrm"; remove it'),
        ({**WIDE, "model": "din"}, "ranking.sequences is empty; din reads a list of earlier items, unpooled"),
        ({**WIDE, "model": "lr"}, "ranking.embedding_dim is 16; lr has one weight for each id: set it to 1"),
        ({**WIDE, "model": "fm", "dropout": 0.1}, 'ranking.dropout has no meaning for model = "fm"; remove it'),
        ({**WIDE, "model": "dcn", "mask_width": 8}, 'ranking.mask_width has no meaning for model = "dcn"; remove it'),
        ({**WIDE, "attention": [8]}, 'ranking.attention has no meaning for model = "wide_deep"; remove it'),
        ({**WIDE, "model": "din", "sequences": "user"}, 'ranking.sequences has "user", which holds ids; it needs lists of ids'),
        ({**WIDE, "bottom": [8]}, 'ranking.bottom has no meaning for model = "wide_deep"; remove it'),
        ({**WIDE, "hidden": [8, 0]}, "ranking.hidden[1] must be a positive integer, got 0"),
        ({**WIDE, "dropout": 1}, "ranking.dropout must be a number from 0 and below 1, got 1"),
        ({**RANKING, "embedding_dim": 0, "bottom": [], "features": "user, item"}, "ranking.embedding_dim must be a positive integer, got 0"),
        ({**RANKING, "bottom": [32, 8]}, 'ranking.bottom ends with 8, but embedding_dim is 16; interaction = "dot" needs them equal'),
        ({**RANKING, "cross_rank": 8}, 'ranking.cross_rank has no meaning for interaction = "dot"; remove it'),
        ({**RANKING, "dynamic": {}}, "ranking.dynamic has no meaning without features that end with key; remove it"),
        ({**WIDE, "wide": "user", "cross": "auto"}, 'ranking.cross is "auto", but ranking.wide has 1 of the features that it can cross; it needs two of one column and one step each: vocabulary, hash, key, map, buckets or quantiles'),
        ({**WIDE, "cross": "all"}, 'ranking.cross must be one of auto, got "all"'),
        ({**TREES, "trees": None}, 'ranking.trees is missing; model = "trees" reads the number features that it names'),
        ({**TREES, "features": "n1"}, 'ranking.features has no meaning for model = "trees", whose settings are in ranking.trees; remove it'),
        ({**TREES, "hidden": [8]}, 'ranking.hidden has no meaning for model = "trees"; remove it'),
        ({**TREES, "train": {"epochs": 2}}, 'ranking.train.epochs has no meaning for model = "trees", whose settings are in ranking.trees; remove it'),
        ({**TREES, "trees": {"features": "user"}}, 'ranking.trees.features has "user", which ends as ids; trees take numbers'),
        ({**WIDE, "wide": "user", "wide_optimizer": {"name": "ftrl", "learning_rate": 0.1, "eps": 1e-8}}, "ranking.wide_optimizer.eps has no meaning for ftrl, which takes: learning_rate, l1, l2, initial_accumulator"),
    ],
)  # fmt: skip
def test_ranking(ranking: dict[str, Any], problem: str) -> None:
    assert problems(ranking=ranking) == [problem]


@pytest.mark.parametrize(
    ("train", "problem"),
    [
        ({"epochs": 0}, "epochs must be a number above 0, got 0"),
        ({"evaluations": -1}, "evaluations must be a positive integer, got -1"),
        ({"target": "auc > 0.8"}, 'target must look like "auc >= 0.80", got "auc > 0.8"'),
        ({"patience": 3, "evaluations": 2}, "patience is 3, but evaluations is 2; there are too few evaluations"),
        ({"target": "0.8"}, 'target must look like "auc >= 0.80", got "0.8"'),
        ({"dense": {"name": "adam"}}, "dense.learning_rate is missing"),
        ({"dense": {"name": "adm", "learning_rate": 1}}, 'dense.name must be one of sgd, adagrad, rowwise_adagrad, adam, adamw, lamb, ftrl, adagrad_decay, got "adm"; did you mean "adam"?'),
        ({"dense": {"name": "adam", "learning_rate": -0.1}}, "dense.learning_rate must be a number above 0, got -0.1"),
        ({"dense": {"name": "adam", "learning_rate": 0.1, "l1": 0.1}}, "dense.l1 has no meaning for adam, which takes: learning_rate, eps, weight_decay"),
        ({"dense": {"name": "rowwise_adagrad", "learning_rate": 0.1}}, "dense.name is rowwise_adagrad, which is for embedding rows; use adagrad"),
        ({"schedule": {"warmup": 1.5}}, "schedule.warmup must be a number from 0 to 1, got 1.5"),
        ({"schedule": {"warmup": 0.5, "decay_from": 0.4}}, "schedule.warmup must be at most decay_from, got 0.5 and 0.4"),
        ({"schedule": {"decay": "cosine", "power": 3}}, 'schedule.power has no meaning for decay = "cosine"; remove it'),
    ],
)  # fmt: skip
def test_training(train: dict[str, Any], problem: str) -> None:
    assert f"ranking.train.{problem}" in problems(ranking={**RANKING, "train": train})


@pytest.mark.parametrize("target", ["auc >= 0.8025", "log_loss<=0.46", " normalised_entropy <= 1e-1"])
def test_targets_are_a_metric_a_sign_and_a_number(target: str) -> None:
    assert problems(ranking={**RANKING, "train": {"target": target}}) == []


@pytest.mark.parametrize(
    ("retrieval", "problem"),
    [
        ({"user": "user", "item": ""}, "retrieval.item is empty; name the features of that tower"),
        ({"user": "user", "item": "item, user"}, 'retrieval.item has "user", which belongs to the user; see `of` in the recipe'),
        ({"user": "user", "item": "item, n1"}, 'retrieval.item has "n1", which belongs to the context; see `of` in the recipe'),
        ({"user": "user", "item": "item", "temperature": 0}, "retrieval.temperature must be a number above 0, got 0"),
    ],
)  # fmt: skip
def test_retrieval(retrieval: dict[str, Any], problem: str) -> None:
    assert problems(retrieval={"label": "clicked", **retrieval}) == [problem]


def test_the_user_tower_may_know_the_context() -> None:
    assert problems(retrieval={"label": "clicked", "user": "user, n1", "item": "item"}) == []


def test_models_need_labels_and_retrieval_needs_to_know_who_and_what() -> None:
    assert problems(labels=[], ranking=RANKING) == ["labels is empty; a model needs at least one"]
    towers = {"label": "clicked", "user": "user", "item": "item"}
    assert problems(log=log(user=None), retrieval=towers) == [
        "retrieval needs log.user and log.item, the columns of users and items"
    ]


@pytest.mark.parametrize("name", ["", "../x", "a b", ".x"])
def test_a_name_that_cannot_be_a_folder_is_refused(name: str) -> None:
    assert problems(name=name) == [f'name must be made of letters, digits, ".", "_" and "-", got "{name}"']


def test_a_generator_must_exist() -> None:
    assert problems(generate="shopp") == [
        'generate must be one of criteo, recsys2021, movielens, shop, got "shopp"; did you mean "shop"?'
    ]


def test_features_that_share_a_vocabulary_hold_one_kind_of_value() -> None:
    shared = {"vocabulary": {"named": "thing"}}
    assert problems(
        features=[
            {"columns": "user", "steps": [shared]},
            {"columns": "time", "steps": [shared]},
            {"columns": "click", "steps": [{"lookup": "thing"}]},
        ]
    ) == [
        'features[1].steps[0].vocabulary gets whole numbers, but "thing" in features[0].steps[0].vocabulary holds text; cast one of them',
        'features[2].steps[0].lookup gets whole numbers, but "thing" in features[0].steps[0].vocabulary holds text; cast one of them',
    ]


def test_a_vocabulary_is_not_named_like_a_feature_that_has_its_own() -> None:
    assert problems(
        features=[
            {"columns": "user", "steps": ["vocabulary"]},
            {"columns": "item", "steps": [{"vocabulary": {"named": "user"}}]},
        ]
    ) == [
        'features[1].steps[0].vocabulary.named is "user", which is the vocabulary of feature "user"; take another name'
    ]


def test_ids_are_neither_clipped_out_of_range_nor_filled_with_others() -> None:
    assert problems(
        features=[
            {"columns": "words", "steps": [{"split": " "}, {"hash": 9}, {"pad": {"length": 3, "value": -1}}]},
            {"columns": "user", "steps": ["vocabulary", {"clip": {"min": 2, "max": 5}}]},
        ]
    ) == [
        "features[0].steps[2].pad.value is -1, but ids are filled with 0, which is not an id",
        "features[1].steps[1].clip takes ids out of their range: min must be 0 or less, and max 0 or more",
    ]


def test_a_column_called_like_a_word_of_sql_needs_double_quotes() -> None:
    columns = [*TREE["log"]["columns"], {"name": "when", "type": "int"}]
    wrong = {"columns": "when", "steps": [{"expression": "when + 1"}]}
    assert problems(log=log(columns=columns), features=[wrong]) == [
        "features[0].steps[0].expression.sql, at character 1: expected a column, a constant or (, found when; "
        'a column called like a keyword needs double quotes: "when"'
    ]
    right = {"columns": "when", "steps": [{"expression": '"when" + 1'}]}
    assert load(log=log(columns=columns), features=[right]).features[0].name == "when"
