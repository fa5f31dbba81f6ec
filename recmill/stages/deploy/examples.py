"""The examples that are checked in. `python -m recmill.stages.deploy.examples deploy` renders them again."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from recmill.recipe.load import load_recipe
from recmill.stages.deploy.deploy import TARGETS, render
from recmill.stages.deploy.settings import DeployConfig
from recmill.stages.deploy.templates import Files

RECIPE = "quickstart"
EXAMPLES = tuple(target for target in TARGETS if target != "stack")  # which is two of the others


def example(target: str) -> Files:
    """What `recmill deploy quickstart` writes without settings; of the chart, which is package data, only values."""
    files = render(load_recipe(RECIPE), target, DeployConfig())
    return {"values.yaml": files["values.yaml"]} if target == "helm" else files


def main(root: Path) -> None:
    """Write the examples of all targets in place of what is there."""
    for target in EXAMPLES:
        shutil.rmtree(root / target, ignore_errors=True)
        for name, text in example(target).items():
            path = root / target / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
            print(f"wrote  {path}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
