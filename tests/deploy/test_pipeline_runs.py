"""The commands of the rendered pipeline, run step by step: published only when the gate passed."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from cluster import Cluster, NoUser, Server, Workflow, deployed, folder_for_all, submit
from validate import kustomized

from recmill.artifacts.bundle.bundle import Bundle, current_of, versions_of
from recmill.cli import main
from recmill.recipe.load import load_recipe
from recmill.recipe.recipe import Recipe
from recmill.stages.deploy.deploy import deploy
from recmill.stages.deploy.settings import DeployConfig

pytestmark = [pytest.mark.stages, pytest.mark.processes, pytest.mark.services]

PIPELINE = "quickstart-pipeline"


@dataclass
class Site:
    """A cluster with target stack applied, a log on its volume, and what runs leave behind."""

    cluster: Cluster

    @property
    def log(self) -> Path:
        return self.cluster.claim("quickstart-data")

    @property
    def runs(self) -> Path:
        return self.cluster.claim("quickstart-runs")

    @property
    def bundles(self) -> Path:
        return self.runs / "bundle"

    def outcome(self, run: str) -> list[str]:
        return (self.runs / "reports" / run / "outcome.txt").read_text().splitlines()


def applied(cluster: Cluster, recipe: Recipe, settings: DeployConfig) -> None:
    """`kubectl apply -k stack/overlays/pvc`."""
    with TemporaryDirectory() as into:
        deploy(recipe, "stack", Path(into), settings)
        cluster.apply(kustomized(Path(into, "stack/overlays/pvc")))


def write_log(folder: Path, rows: int) -> None:
    """A log in place of the one that was there. It is not the user's of pods, who may only read it."""
    os.chown(folder, os.getuid(), os.getgid())
    for path in folder.iterdir():
        path.unlink()
    assert main(["generate", "shop", "--rows", str(rows), "--seed", "1", "--into", str(folder)]) == 0


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    folder = folder_for_all("recmill-cluster-")
    try:
        site = Site(Cluster(folder))
        applied(site.cluster, load_recipe("quickstart"), DeployConfig())
        yield site
    except NoUser as reason:
        pytest.skip(str(reason))
    finally:
        shutil.rmtree(folder)


@pytest.fixture(scope="module")
def server(site: Site) -> Iterator[Server]:
    """The Deployment of servers. Where nothing is published yet, it waits for its first bundle."""
    with deployed(site.cluster, "quickstart-serve") as server:
        yield server


@pytest.fixture(scope="module")
def first(site: Site, server: Server) -> Workflow:
    """The first run, on an empty volume."""
    write_log(site.log, 5_000)
    return submit(site.cluster, PIPELINE, "first", {"server": server.url})


def test_a_raw_log_becomes_a_served_bundle(site: Site, server: Server, first: Workflow) -> None:
    run = first
    assert run.status == "Succeeded", run
    one_by_one = ["tidy", "check", "prepare", "train", "evaluate", "export", "publish", "roll-out"]
    assert run.steps == [*one_by_one, "keep-outcome"]
    assert "skip   normalised_entropy <= live" in run.output("evaluate")
    assert "pass   normalised_entropy <= constant" in run.output("evaluate")
    version = current_of(site.bundles)
    assert run.output("roll-out").endswith(f"served {version}\n")
    assert (site.bundles / str(version) / "report.html").is_file()
    assert site.outcome("first")[0] == "Succeeded"
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        server.wait(probe)
    assert server.ask("/v1/status")["version"] == version
    # It waited for the bundle, and was started once.
    assert [one.output for one in server.initialized] == [
        f"wait   {site.bundles}: no version yet\nfound  {version}\n"
    ]
    assert server.ended == []
    user = (site.log / "users.csv").read_text().splitlines()[1].split(",")[0]
    assert len(server.ask("/v1/recommend", {"user": user, "k": 5})["items"]) == 5


def test_an_unreachable_target_is_tried_again_and_then_refused(
    site: Site, server: Server, first: Workflow
) -> None:
    """With a longer log, features are fitted anew, and the live model is measured on the same rows."""
    server.wait("readinessProbe")
    live = current_of(site.bundles)
    write_log(site.log, 5_500)
    wanted = {"server": server.url, "gate": "auc>=0.999,ne<=live", "retry-limit": "1"}
    run = submit(site.cluster, PIPELINE, "second", wanted)
    assert run.status == "Failed", run
    assert run.steps[:5] == ["tidy", "check", "prepare", "train", "evaluate"]
    assert run.steps[5:] == ["train", "evaluate", "set-aside", "refuse", "keep-outcome"], run
    first, second = (one.output for one in run.ran if one.step == "train")
    assert "resumed from step" not in first
    assert "resumed from step" in second
    assert "FAIL   auc >= 0.999" in run.output("evaluate")
    assert re.search(
        r"(pass|FAIL)   normalised_entropy <= live   found [\d.]+, bound [\d.]+", run.output("evaluate")
    )
    # Nothing was published, and what was live still answers.
    assert versions_of(site.bundles) == [live]
    assert current_of(site.bundles) == live
    assert server.ask("/v1/status")["version"] == live
    (rejected,) = versions_of(site.runs / "rejected")
    aside = Bundle.open(site.runs / "rejected" / rejected)
    assert aside.manifest["gate"]["passed"] is False
    assert "Not all conditions are met" in (aside.path / "report.html").read_text()
    assert current_of(site.runs / "rejected") is None
    assert [path.name for path in (site.runs / "work").iterdir()] == ["second"]  # the first was tidied up
    status, failures = site.outcome("second")
    assert status == "Failed"
    assert json.loads(failures)[0]["displayName"] == "refuse"
