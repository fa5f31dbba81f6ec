"""train-job: what the Job runs, as whom, and on which storage."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from recmill.cli import build_parser
from recmill.recipe.load import load_recipe
from recmill.recipe.recipe import Recipe
from recmill.stages.deploy.deploy import deploy, render
from recmill.stages.deploy.settings import DeployConfig, DeployError
from recmill.stages.deploy.yaml import loads

Run = Callable[..., tuple[int, str, str]]
OVERLAYS = ("pvc", "nfs")


def rendered(recipe: Recipe, *pairs: str) -> dict[str, list[Any]]:
    return {name: loads(text) for name, text in render(recipe, "train-job", DeployConfig.of(pairs)).items()}


def pod(recipe: Recipe, *pairs: str) -> Any:
    return rendered(recipe, *pairs)["base/job.yaml"][0]["spec"]["template"]["spec"]


def steps(recipe: Recipe, *pairs: str) -> list[Any]:
    spec = pod(recipe, *pairs)
    return [*spec["initContainers"], *spec["containers"]]


def test_prepare_comes_before_train_and_train_before_evaluate(quickstart: Recipe) -> None:
    assert [step["command"][:3] for step in steps(quickstart)] == [
        ["recmill", "prepare", "quickstart"],
        ["recmill", "train", "quickstart"],
        ["recmill", "evaluate", "quickstart"],
    ]


@pytest.mark.parametrize("name", ["quickstart", "criteo-dlrm", "criteo-widedeep", "ml1m-leave-last-out"])
def test_commands_are_those_of_the_command_line(name: str) -> None:
    for step in steps(load_recipe(name)):
        build_parser().parse_args(step["command"][1:])


def test_training_goes_on_from_its_checkpoint(quickstart: Recipe) -> None:
    _, train, _ = steps(quickstart)
    assert train["command"][-1] == "--resume"


def test_a_lost_node_is_no_failure_but_a_failed_gate_is_the_end(quickstart: Recipe) -> None:
    spec = rendered(quickstart)["base/job.yaml"][0]["spec"]
    lost, gate, wrong = spec["podFailurePolicy"]["rules"]
    assert lost["action"] == "Ignore"
    assert gate["onExitCodes"] == {"containerName": "evaluate", "operator": "In", "values": [1]}
    assert wrong["onExitCodes"]["values"] == [2]
    assert spec["template"]["spec"]["restartPolicy"] == "Never"  # a policy for failures demands it
    assert spec["backoffLimit"] == 3


def test_a_ranker_must_beat_the_constant_predictor_without_being_told(quickstart: Recipe) -> None:
    assert steps(quickstart)[-1]["command"][-2:] == ["--gate", "ne<=constant"]
    assert steps(quickstart, "gate=auc>=0.7")[-1]["command"][-1] == "auc>=0.7"


def test_retrieval_alone_has_no_gate_unless_it_is_told_one() -> None:
    assert "--gate" not in steps(load_recipe("ml1m-leave-last-out"))[-1]["command"]


def test_a_gate_on_the_live_model_is_for_the_pipeline(quickstart: Recipe) -> None:
    with pytest.raises(DeployError, match="compares with the live model, which only target pipeline knows"):
        rendered(quickstart, "gate=ne<=live")


def test_nothing_runs_as_root_or_with_more_than_it_needs(quickstart: Recipe) -> None:
    spec = pod(quickstart, "user=2000", "group=3000")
    assert spec["automountServiceAccountToken"] is False
    assert {key: spec["securityContext"][key] for key in ("runAsNonRoot", "runAsUser", "runAsGroup", "fsGroup")} == {
        "runAsNonRoot": True, "runAsUser": 2000, "runAsGroup": 3000, "fsGroup": 3000,
    }  # fmt: skip
    for step in [*spec["initContainers"], *spec["containers"]]:
        assert step["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert step["resources"]["requests"] == step["resources"]["limits"]


def test_the_log_is_mounted_read_only_and_only_where_it_is_read(quickstart: Recipe) -> None:
    places = {
        step["name"]: {mount["name"]: mount for mount in step["volumeMounts"]} for step in steps(quickstart)
    }
    assert places["prepare"]["data"]["readOnly"] is True
    assert "data" not in places["train"]
    assert "data" not in places["evaluate"]


def test_the_log_may_lie_deeper_in_a_claim_that_is_there_already(quickstart: Recipe) -> None:
    pairs = ["data.claim=logs", "data.path=shop/2026"]
    assert "/data/shop/2026" in steps(quickstart, *pairs)[0]["command"]
    claims = [found["metadata"]["name"] for found in rendered(quickstart, *pairs)["overlays/pvc/claims.yaml"]]
    assert claims == ["quickstart-runs"]
    names = [
        v["persistentVolumeClaim"]["claimName"]
        for v in pod(quickstart, *pairs)["volumes"]
        if "emptyDir" not in v
    ]
    assert names == ["logs", "quickstart-runs"]


def test_claims_and_nfs_never_meet(quickstart: Recipe) -> None:
    files = render(quickstart, "train-job", DeployConfig())
    for name, text in files.items():
        assert ("nfs:" in text) == (name == "overlays/nfs/claims.yaml")
    kinds = {
        kind: [found["kind"] for found in loads(files[f"overlays/{kind}/claims.yaml"])] for kind in OVERLAYS
    }
    assert kinds["pvc"] == ["PersistentVolumeClaim"] * 2
    assert kinds["nfs"] == ["PersistentVolume", "PersistentVolumeClaim"] * 2


@pytest.mark.parametrize("kind", OVERLAYS)
def test_every_overlay_has_the_claims_that_the_job_mounts(quickstart: Recipe, kind: str) -> None:
    made = {
        found["metadata"]["name"]
        for found in rendered(quickstart)[f"overlays/{kind}/claims.yaml"]
        if found["kind"] == "PersistentVolumeClaim"
    }
    assert made == {
        v["persistentVolumeClaim"]["claimName"] for v in pod(quickstart)["volumes"] if "emptyDir" not in v
    }


def test_a_volume_of_nfs_is_for_its_own_claim_alone(quickstart: Recipe) -> None:
    pairs = ["storage.nfs.server=10.0.0.5", "storage.nfs.path=/exports/shop", "namespace=shop"]
    volume, claim, *_ = rendered(quickstart, *pairs)["overlays/nfs/claims.yaml"]
    assert volume["spec"]["nfs"] == {"server": "10.0.0.5", "path": "/exports/shop/runs"}
    assert volume["spec"]["claimRef"]["namespace"] == "shop"
    assert claim["spec"]["volumeName"] == volume["metadata"]["name"] == "shop-quickstart-runs"
    assert claim["spec"]["storageClassName"] == volume["spec"]["storageClassName"] == ""


def test_a_storage_class_is_written_only_when_there_is_one(quickstart: Recipe) -> None:
    def first(*pairs: str) -> Any:
        return rendered(quickstart, *pairs)["overlays/pvc/claims.yaml"][0]["spec"]

    assert "storageClassName" not in first()
    assert first("storage.class_name=fast")["storageClassName"] == "fast"
    assert first("storage.size=7Gi")["resources"]["requests"]["storage"] == "7Gi"


def test_a_recipe_of_ones_own_comes_along_in_a_config_map(quickstart: Recipe, tmp_path: Path) -> None:
    assert quickstart.ranking is not None
    own = replace(quickstart, name="mine", ranking=replace(quickstart.ranking, top=(32,)))
    files = rendered(own)
    config = files["base/recipe.yaml"][0]
    (tmp_path / "recipe.toml").write_text(config["data"]["recipe.toml"])
    assert load_recipe(str(tmp_path / "recipe.toml")) == own
    assert steps(own)[0]["command"][2] == "/etc/recmill/recipe.toml"
    volume = next(volume for volume in pod(own)["volumes"] if volume["name"] == "recipe")
    assert volume["configMap"]["name"] == config["metadata"]["name"] == "mine-recipe"
    assert files["base/kustomization.yaml"][0]["resources"] == ["job.yaml", "recipe.yaml"]


def test_names_and_namespace_are_set_once(quickstart: Recipe) -> None:
    files = render(quickstart, "train-job", DeployConfig.of(["name=shop", "namespace=team-a"]))
    assert not any("quickstart-" in text for text in files.values())
    for name, text in files.items():
        if name.endswith("kustomization.yaml"):
            assert loads(text)[0]["namespace"] == "team-a"


@pytest.mark.stages
def test_its_commands_take_a_log_to_a_checkpoint_and_a_second_pod_does_nothing_twice(
    recmill: Run, quickstart: Recipe, tmp_path: Path
) -> None:
    data, runs = tmp_path / "data", tmp_path / "runs"
    assert recmill("generate", "shop", "--rows", 30_000, "--into", data)[0] == 0

    def pod_runs(*pairs: str) -> list[int]:
        """Exit codes of a pod's containers, with its volumes mapped to folders here; what fails ends it."""
        codes: list[int] = []
        for step in steps(quickstart, *pairs):
            mapped = [re.sub("^/data", str(data), part) for part in step["command"][1:]]
            codes.append(recmill(*(re.sub("^/runs", str(runs), part) for part in mapped))[0])
            if codes[-1]:
                break
        return codes

    assert pod_runs("gate=auc>=0.99") == [0, 0, 1]
    trained = sorted(
        (path, path.stat().st_mtime_ns) for path in (runs / "checkpoint").rglob("dense.safetensors")
    )
    assert trained
    assert pod_runs() == [0, 0, 0]
    assert trained == [(path, path.stat().st_mtime_ns) for path, _ in trained]
    assert (runs / "report.html").exists()


def test_a_file_that_was_changed_by_hand_is_kept_unless_forced(quickstart: Recipe, tmp_path: Path) -> None:
    written = deploy(quickstart, "train-job", tmp_path, DeployConfig())
    target = tmp_path / "train-job" / "base" / "job.yaml"
    assert target in written
    deploy(
        quickstart, "train-job", tmp_path, DeployConfig.of(["user=5"])
    )  # nobody changed it: may be rendered anew
    target.write_text(target.read_text() + "# mine\n")
    with pytest.raises(DeployError, match=r"base/job.yaml was changed by hand.*--force"):
        deploy(quickstart, "train-job", tmp_path, DeployConfig())
    assert target.read_text().endswith("# mine\n")
    deploy(quickstart, "train-job", tmp_path, DeployConfig(), force=True)
    assert not target.read_text().endswith("# mine\n")


def test_files_that_are_not_rendered_any_more_are_removed(quickstart: Recipe, tmp_path: Path) -> None:
    deploy(replace(quickstart, name="mine"), "train-job", tmp_path, DeployConfig())
    assert (tmp_path / "train-job/base/recipe.yaml").exists()
    deploy(quickstart, "train-job", tmp_path, DeployConfig())
    assert not (tmp_path / "train-job/base/recipe.yaml").exists()


def test_an_unknown_target_is_named_with_the_nearest(quickstart: Recipe) -> None:
    with pytest.raises(DeployError, match='there is no target "train_job"; did you mean "train-job"'):
        render(quickstart, "train_job", DeployConfig())
