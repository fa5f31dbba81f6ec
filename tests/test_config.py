"""Config dataclasses are the one source of flags: their names, defaults and help texts."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from recmill.cli import build_parser
from recmill.cli.flags import UsageError, add_flags, read_config, refuse_flags
from recmill.config import FRACTION, SECONDS, SIZE, flag_fields, parse_size, show_size
from recmill.stages.bench.config import PrepareBenchConfig
from recmill.stages.prepare.config import PrepareConfig
from recmill.stages.run.config import RunConfig
from recmill.stages.serve.config import ServeConfig
from recmill.stages.train.config import FollowConfig, RayTrainConfig, TrainConfig


def parsed(config: type, *arguments: str, **options: Any) -> argparse.Namespace:
    parser = argparse.ArgumentParser(exit_on_error=False)
    add_flags(parser, config, **options)
    return parser.parse_args(arguments)


def test_no_flags_give_the_defaults_of_the_config() -> None:
    assert read_config(parsed(PrepareConfig), PrepareConfig) == PrepareConfig()


def test_flags_become_values_of_their_fields() -> None:
    given = parsed(
        PrepareConfig,
        *("--engine", "spark", "--memory", "1GB", "--max-bad", "2%", "--binary"),
        *("--spark-conf", "a=1", "--spark-conf", "b=2"),
    )
    assert read_config(given, PrepareConfig) == PrepareConfig(
        engine="spark", memory=1 << 30, max_bad=0.02, binary=True, spark_conf={"a": "1", "b": "2"}
    )


def test_a_flag_may_have_another_name_and_unit_than_its_field() -> None:
    assert read_config(parsed(FollowConfig, "--for", "9"), FollowConfig).max_seconds == 9
    given = parsed(ServeConfig, "--deadline-ms", "250", "--no-watch")
    config = read_config(given, ServeConfig, bundle=Path("b"))
    assert (config.deadline_seconds, config.watch) == (0.25, False)


def test_two_configs_of_a_command_may_have_fields_of_one_name() -> None:
    parser = argparse.ArgumentParser()
    add_flags(parser, PrepareConfig, rename={"workers": "--prepare-workers"}, leave_out=("address",))
    add_flags(parser, RayTrainConfig)
    given = parser.parse_args(["--prepare-workers", "3", "--workers", "2..4"])
    assert read_config(given, PrepareConfig).workers == 3
    assert read_config(given, RayTrainConfig).workers == (2, 4)


def test_a_flag_that_was_given_is_refused_also_when_it_has_its_default() -> None:
    given = parsed(TrainConfig, "--wire", "float32")
    with pytest.raises(UsageError, match=r"^--wire is for several workers\.$"):
        refuse_flags(given, TrainConfig, "is for several workers.")
    refuse_flags(given, TrainConfig, "is for several workers.", only=("balance",))


def test_help_shows_the_default_as_it_would_be_written() -> None:
    help_of = {field.option: field.help for field in flag_fields(ServeConfig)}
    assert help_of["--http-port"] == "0: a free one (default: 8080)"
    assert help_of["--max-body"].endswith("(default: 16MB)")
    assert help_of["--deadline-ms"].endswith("(default: 1000)")
    assert help_of["--request-log-share"].endswith("(default: 1%)")
    assert help_of["--watch"].endswith("(default: yes)")
    assert help_of["--shadow"] == "ask this version too, and count differences"


@pytest.mark.parametrize("text", ["1B", "64KB", "16MB", "2GB", "1.5TB"])
def test_sizes_are_shown_as_they_are_read(text: str) -> None:
    assert show_size(parse_size(text)) == text


@pytest.mark.parametrize(
    ("kind", "text", "expected"),
    [
        (SIZE, "much", "must be a size such as 500MB or 2GB, got much"),
        (FRACTION, "nan", "must be a fraction such as 0.001 or 0.1%, got nan"),
        (SECONDS, "0", "must be a number of seconds above 0, got 0"),
    ],
)
def test_a_wrong_value_names_what_was_expected(kind: Any, text: str, expected: str) -> None:
    with pytest.raises(ValueError, match=f"^{expected}$"):
        kind.parse(text)


def test_help_names_values_by_the_flag_and_not_by_its_config() -> None:
    parser = argparse.ArgumentParser()
    add_flags(parser, PrepareBenchConfig)
    assert "--recipe RECIPE" in parser.format_help()
    assert "CONFIG" not in parser.format_help()


def test_every_flag_has_a_help_text_and_every_default_is_of_its_kind() -> None:
    for config in (PrepareConfig, TrainConfig, RayTrainConfig, FollowConfig, ServeConfig, RunConfig):
        for flag in flag_fields(config):
            assert flag.flag.help
            if flag.choices and isinstance(flag.default, str):
                assert flag.default in flag.choices


def test_a_config_whose_annotations_are_text_is_noticed() -> None:
    from recmill.config import Flag

    @dataclass
    class TextConfig:
        names: Annotated[Mapping[str, str], Flag("x")] = field(default_factory=dict)  # type: ignore  # noqa: F821

    with pytest.raises(AssertionError, match="annotations are text"):
        list(flag_fields(TextConfig))


def test_all_commands_can_be_built() -> None:
    assert "prepare" in build_parser().format_help()
