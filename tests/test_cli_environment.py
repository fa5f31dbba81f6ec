"""Flags from the environment, errors as JSON, what is said at which level, and completion in shells."""

import argparse
import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from recmill.cli import build_parser
from recmill.cli.arguments import note, set_log_level, warn
from recmill.cli.environment import with_environment
from recmill.cli.flags import UsageError, read_config
from recmill.synthetic.config import GenerateConfig

Run = Callable[..., tuple[int, str, str]]


def parsed(arguments: list[str], **variables: str) -> argparse.Namespace:
    parser = build_parser()
    return parser.parse_args(with_environment(parser, arguments, variables))


def test_a_variable_is_a_flag_of_its_command_and_of_no_other() -> None:
    variables = {"RECMILL_CHECK_DATA": "logs", "RECMILL_GENERATE_SEED": "5"}
    assert parsed(["check", "quickstart"], **variables).data == "logs"
    made = parsed(["generate", "shop", "--rows", "9", "--into", "x"], **variables)
    assert read_config(made, GenerateConfig).seed == 5


def test_a_flag_of_the_command_line_wins_over_a_variable() -> None:
    assert parsed(["check", "quickstart", "--data", "mine"], RECMILL_CHECK_DATA="logs").data == "mine"


def test_a_required_flag_may_come_from_a_variable() -> None:
    assert parsed(["serve"], RECMILL_SERVE_BUNDLE="runs/b").bundle == "runs/b"


def test_a_switch_is_on_or_off() -> None:
    assert parsed(["check", "quickstart"], RECMILL_CHECK_JSON="true").json
    assert not parsed(["check", "quickstart"], RECMILL_CHECK_JSON="0").json
    with pytest.raises(UsageError, match=r"^RECMILL_CHECK_JSON must be 1 or 0, because --json .* got maybe$"):
        parsed(["check", "quickstart"], RECMILL_CHECK_JSON="maybe")


def test_a_flag_that_may_be_repeated_takes_one_value_a_line() -> None:
    lines = {"RECMILL_CHECK_SET": "a=1\nb=2"}
    assert parsed(["check", "quickstart"], **lines).overrides == ["a=1", "b=2"]
    assert parsed(["check", "quickstart", "--set", "c=3"], **lines).overrides == ["c=3"]


def test_a_stage_of_bench_has_variables_of_its_own() -> None:
    assert parsed(["bench", "prepare"], RECMILL_BENCH_PREPARE_JSON="1").json


def test_a_variable_without_a_flag_is_an_error(recmill: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RECMILL_CHECK_COLOUR", "red")
    code, _, errors = recmill("check", "quickstart")
    assert code == 2
    assert (
        errors
        == "recmill: The environment has RECMILL_CHECK_COLOUR, but `recmill check` has no flag --colour.\n"
    )


@pytest.mark.parametrize(
    ("arguments", "kind", "code", "message"),
    [
        (["check", "nowhere.toml", "--json"], "RecipeError", 2, "nowhere.toml"),
        (["prepare", "quickstart", "--json"], "UsageError", 2, "--data"),
        (["check", "quickstart", "--sett", "a=1", "--json"], "UsageError", 2, "--sett"),
    ],
)
def test_with_json_an_error_is_a_json_object(
    recmill: Run, arguments: list[str], kind: str, code: int, message: str
) -> None:
    status, output, errors = recmill(*arguments)
    error = json.loads(errors)["error"]
    assert (status, output, error["type"], error["exit_code"]) == (code, "", kind, code)
    assert message in error["message"]


def test_without_json_a_wrong_flag_shows_the_usage_of_its_command(recmill: Run) -> None:
    code, _, errors = recmill("prepare", "quickstart")
    assert code == 2
    assert errors.startswith("usage: recmill prepare ")
    assert "recmill prepare: error: the following arguments are required: --data" in errors


def test_notes_and_warnings_follow_the_level(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RECMILL_LOG_LEVEL", "info")  # restored afterwards, because a level changes it
    shown = {}
    for level in ("info", "warning", "error"):
        set_log_level(level)
        note("a note")
        warn("a warning")
        shown[level] = capsys.readouterr().err.splitlines()
    set_log_level("info")
    assert shown == {
        "info": ["note   a note", "warning: a warning"],
        "warning": ["warning: a warning"],
        "error": [],
    }


def test_an_unknown_level_in_the_environment_is_an_error(
    recmill: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RECMILL_LOG_LEVEL", "loud")
    code, _, errors = recmill("recipes")
    assert code == 2
    assert "RECMILL_LOG_LEVEL must be one of debug, info, warning, error, got loud" in errors


def test_bash_completes_commands_and_their_flags(recmill: Run, tmp_path: Path) -> None:
    code, script, _ = recmill("completion", "bash")
    assert code == 0
    (tmp_path / "completion.bash").write_text(script)
    ask = """
source completion.bash
complete_words() {
  COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMPREPLY=()
  "$(complete -p recmill | sed 's/.*-F \\([^ ]*\\) .*/\\1/')" recmill "${COMP_WORDS[COMP_CWORD]}" ""
  echo "${COMPREPLY[@]}"
}
complete_words recmill prep
complete_words recmill train --thre
"""
    answer = subprocess.run(["bash", "-c", ask], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert answer.stdout.split() == ["prepare", "--threads"]
