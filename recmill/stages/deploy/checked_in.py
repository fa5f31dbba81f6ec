"""The manifests that are checked in. `python -m recmill.stages.deploy.checked_in deploy` renders them again."""

from __future__ import annotations

import sys
from pathlib import Path

from recmill.recipe.load import load_recipe
from recmill.stages.deploy.deploy import deploy
from recmill.stages.deploy.settings import DeployConfig

_OF_ALL = ("train-job", "pipeline", "ray")
# Folder below deploy/ -> recipe and targets. Images and the chart are the same for every recipe.
CHECKED_IN: dict[str, tuple[str, tuple[str, ...]]] = {
    ".": ("quickstart", ("docker", "helm")),
    "quickstart": ("quickstart", (*_OF_ALL, "serve", "spark")),
    "criteo-dlrm": ("criteo-dlrm", _OF_ALL),
    "criteo-widedeep": ("criteo-widedeep", _OF_ALL),
}


def main(root: Path) -> None:
    for folder, (recipe, targets) in CHECKED_IN.items():
        for target in targets:
            for path in deploy(load_recipe(recipe), target, root / folder, DeployConfig(), force=True):
                print(f"wrote  {path}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
