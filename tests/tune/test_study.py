"""A study remembers, goes on and repeats nothing. Trials are made up here; nothing is trained."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from small_study import small_recipe

from recmill.errors import ArtifactError, MissingPackage, RecipeError
from recmill.recipe.load import load_recipe
from recmill.stages.tune.space import all_drawn, own_values, values_of
from recmill.stages.tune.study import JOURNAL, Study, Trial

TWO = 'tune.space={ "ranking.embedding_dim" = [4, 2], "ranking.top" = [[8], [16, 8]] }'


def found(trial: Trial, auc: float = 0.7) -> dict[str, float]:
    return {"auc": auc, "seconds": float(trial.recipe.ranking.embedding_dim), "parameters": 9, "bytes": 36}


def complete(study: Study, auc: float = 0.7) -> Trial:
    trial = study.next()
    assert trial is not None
    study.completed(trial.number, found(trial, auc))
    return trial


def states(study: Study) -> list[str]:
    return [one.state for one in study.tried()]


def test_the_recipe_as_it_is_comes_first(opened: Any) -> None:
    with opened(small_recipe(TWO)) as study:
        first = complete(study)
        assert first.values == {"ranking.embedding_dim": 4, "ranking.top": [8]}
        assert first.recipe == small_recipe(TWO)
        assert study.own().number == first.number


def test_a_recipe_outside_of_its_space_is_not_tried(opened: Any) -> None:
    with opened(small_recipe(TWO, "ranking.embedding_dim=3")) as study:
        assert complete(study).values["ranking.embedding_dim"] in (4, 2)
        assert study.own() is None


def test_every_combination_is_tried_once_and_then_the_study_is_done(opened: Any) -> None:
    with opened(small_recipe(TWO), trials=100) as study:
        seen = [complete(study).values for _ in range(4)]
        assert len({str(values) for values in seen}) == 4
        assert study.next() is None
        assert states(study) == ["complete"] * 4


def test_the_budget_counts_trials_of_earlier_runs(opened: Any) -> None:
    with opened(small_recipe(TWO), trials=2) as study:
        complete(study)
        running = study.next()
        assert running is not None
        assert study.next() is None
        study.failed(running.number, "it was too much")
    with opened(small_recipe(TWO), trials=2) as study:
        assert study.next() is None
        assert [one.reason for one in study.tried()] == ["", "it was too much"]
    with opened(small_recipe(TWO), trials=3) as study:
        assert study.next() is not None


def test_no_trial_begins_after_the_time_is_up(opened: Any) -> None:
    with opened(small_recipe(TWO), minutes=1e-9) as study:
        assert study.next() is None


def test_what_ran_when_a_search_died_is_tried_again(opened: Any) -> None:
    with opened(small_recipe(TWO)) as study:
        complete(study)
        lost = study.next()
        assert lost is not None
        study.heard(lost.number, {"auc": 0.6, "seconds": 1.0, "share": 0.5})
    with opened(small_recipe(TWO)) as study:
        again = study.next()
        assert again is not None
        assert again.values == lost.values
        study.completed(again.number, found(again))
        assert states(study) == ["complete", "interrupted", "complete"]


def test_half_a_line_and_a_lock_that_a_dead_search_left_are_cleared(opened: Any, tmp_path: Path) -> None:
    journal = tmp_path / "study" / JOURNAL
    with opened(small_recipe(TWO)) as study:
        complete(study)
    with open(journal, "ab") as file:
        file.write(b'{"op_code": 4, "wor')
    Path(f"{journal}.lock").symlink_to(journal)
    with opened(small_recipe(TWO)) as study:
        assert states(study) == ["complete"]
        complete(study)


def test_a_study_of_something_else_is_not_continued(opened: Any) -> None:
    with opened(small_recipe(TWO)):
        pass
    with (
        pytest.raises(ArtifactError, match=r"began with another Table\. Choose another --into"),
        opened(small_recipe(TWO), table="table 2"),
    ):
        pass
    with (
        pytest.raises(ArtifactError, match="another search space"),
        opened(small_recipe('tune.space={ "ranking.embedding_dim" = [4, 8] }')),
    ):
        pass
    with (
        pytest.raises(ArtifactError, match="another recipe"),
        opened(small_recipe(TWO, "ranking.train.epochs=3")),
    ):
        pass


def test_two_searches_do_not_share_a_folder(opened: Any) -> None:
    with (
        opened(small_recipe(TWO)),
        pytest.raises(ArtifactError, match="is being written by"),
        opened(small_recipe(TWO)),
    ):
        pass


def test_values_that_do_not_go_together_fail_without_a_process(opened: Any) -> None:
    space = 'tune.space={ "ranking.interaction" = ["cat", "dot"], "ranking.embedding_dim" = [4, 8] }'
    with opened(small_recipe("ranking.bottom=[8]", space), trials=4) as study:
        for _ in range(3):
            complete(study)
        assert study.next() is None
        (failed,) = [one for one in study.tried() if one.state == "failed"]
        assert failed.values == {"ranking.interaction": "dot", "ranking.embedding_dim": 4}
        assert failed.reason.startswith("ranking.bottom ends with 8, but embedding_dim is 4")


def test_a_trial_that_is_behind_is_told_to_stop_but_neither_early_nor_at_its_end(opened: Any) -> None:
    recipe = small_recipe('tune.space={ "ranking.train.dense.learning_rate" = { low = 0.001, high = 0.01 } }')
    good = {"auc": 0.8, "seconds": 1.0, "share": 0.5}
    with opened(recipe) as study:
        for _ in range(4):
            trial = study.next()
            assert study.heard(trial.number, good) is None
            study.completed(trial.number, {"auc": 0.8, "seconds": 2.0})
        late, early = study.next(), study.next()
        assert study.heard(late.number, {**good, "auc": 0.5, "share": 1.0}) is None
        assert study.heard(study.next().number, {**good, "auc": 0.5, "share": 0.1}) is None
        reason = study.heard(early.number, {**good, "auc": 0.5})
        assert reason.startswith("auc was 0.5000 at evaluation 1")
        study.pruned(early.number, reason)
        assert [one.state for one in study.tried() if one.number == early.number] == ["pruned"]


def test_pruning_can_be_left_out(opened: Any) -> None:
    recipe = small_recipe(TWO, "tune.pruning=false", 'tune.objectives=["auc"]')
    with opened(recipe) as study:
        for auc in (0.9, 0.9, 0.9):
            complete(study, auc)
        trial = study.next()
        assert study.heard(trial.number, {"auc": 0.1, "seconds": 1.0, "share": 0.1}) is None


def test_the_same_seed_draws_the_same_values_and_a_study_that_goes_on_draws_others(
    opened: Any, tmp_path: Path
) -> None:
    recipe = small_recipe(
        'tune.space={ "ranking.train.dense.learning_rate" = { low = 0.001, high = 0.01, log = true } }'
    )

    def drawn(count: int) -> list[float]:
        with opened(recipe, seed=3) as study:
            return [complete(study).values["ranking.train.dense.learning_rate"] for _ in range(count)]

    first = drawn(3)
    assert set(drawn(3)).isdisjoint(first)
    (tmp_path / "study" / JOURNAL).unlink()
    assert drawn(3) == first


def test_objectives_that_were_not_measured_fail_with_what_was(opened: Any) -> None:
    with opened(small_recipe(TWO)) as study:
        trial = study.next()
        study.completed(trial.number, {"seconds": 1.0})
        (only,) = study.tried()
        assert (only.state, only.reason) == (
            "failed",
            'objective "auc" is not among what was measured: seconds',
        )


def test_a_choice_that_goes_with_nothing_is_an_error_before_anything_runs(opened: Any) -> None:
    recipe = load_recipe(
        "criteo-dlrm", ['tune.space={ "ranking.embedding_dim" = [16, 8], "ranking.top" = [[256], [64]] }']
    )
    with pytest.raises(RecipeError) as caught, opened(recipe):
        pass
    assert caught.value.problems == (
        "tune.space.ranking.embedding_dim has 8, which goes with no value of the other keys: ranking.bottom ends "
        'with 16, but embedding_dim is 8; interaction = "dot" needs them equal. Keys that depend on each other can '
        "be set together, by choices that are tables",
    )


def test_a_recipe_without_tune_says_how_to_add_it(opened: Any) -> None:
    with (
        pytest.raises(RecipeError, match=r"tune is missing; say what to search, such as --set"),
        opened(load_recipe("criteo-dcn")),
    ):
        pass


def test_numbers_are_whole_where_the_recipe_wants_whole_numbers(opened: Any) -> None:
    sizes = '"ranking.train.batch_size" = { low = 128, high = 512, step = 128 }'
    space = f'tune.space={{ {sizes}, "ranking.dropout" = {{ low = 0, high = 0.5 }} }}'
    with opened(small_recipe(space)) as study:
        seen = [complete(study).values for _ in range(8)]
    assert {values["ranking.train.batch_size"] for values in seen} <= {128, 256, 384, 512}
    assert all(isinstance(values["ranking.dropout"], float) for values in seen[1:])


def test_a_choice_that_is_a_table_is_one_combination() -> None:
    recipe = load_recipe("quickstart")
    space = recipe.tune.space
    own = own_values(recipe, space)
    assert own is not None
    assert values_of(space, own)["ranking"] == {"embedding_dim": 16, "bottom": [64, 16]}
    assert all_drawn(space) is None
    del space["ranking.train.dense.learning_rate"]
    assert len(list(all_drawn(space))) == 9


def test_without_optuna_the_install_line_is_said(opened: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    with (
        pytest.raises(
            MissingPackage, match=r'recmill tune needs optuna\. Install it: pip install "recmill\[tune\]"'
        ),
        opened(small_recipe(TWO)),
    ):
        pass
