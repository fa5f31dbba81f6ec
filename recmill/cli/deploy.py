"""`recmill deploy`."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING, Any

from recmill.cli.arguments import add_command, add_json

if TYPE_CHECKING:
    from pathlib import Path

    from recmill.stages.deploy.settings import DeployConfig


def add(commands: Any) -> None:
    parser = add_command(
        commands,
        "deploy",
        _deploy,
        "render a recipe's manifests for Kubernetes, Argo, Helm, Ray, Spark or Docker, to review and apply",
        """
recmill deploy quickstart --target stack --into out
recmill deploy quickstart --target train-job --into out
recmill deploy mine.toml --target serve --into out --set namespace=shop --set serve.replicas=3
recmill deploy criteo-dlrm --target pipeline --into out --set storage.kind=nfs --set storage.nfs.server=10.0.0.5
recmill deploy quickstart --target docker --into deploy
""",
    )
    parser.add_argument(
        "recipe", metavar="RECIPE", help="a shipped recipe's name, a TOML file, or file.py:function"
    )
    parser.add_argument(
        "--target",
        required=True,
        metavar="TARGET",
        help="stack, train-job, pipeline, serve, helm, ray, spark or docker",
    )
    parser.add_argument("--into", required=True, metavar="DIR", help="files land in DIR/TARGET")
    parser.add_argument(
        "--set",
        metavar="KEY=VALUE",
        action="append",
        default=[],
        dest="settings",
        help="a setting, such as namespace=shop or serve.replicas=3; see docs/deploy.md",
    )
    parser.add_argument("--force", action="store_true", help="overwrite files that were changed by hand")
    add_json(parser)


def _deploy(parsed: argparse.Namespace) -> int:
    from pathlib import Path

    from recmill.recipe.load import load_recipe
    from recmill.stages.deploy.deploy import deploy
    from recmill.stages.deploy.settings import DeployConfig

    recipe = load_recipe(parsed.recipe)
    settings = DeployConfig.of(parsed.settings)
    written = deploy(recipe, parsed.target, Path(parsed.into), settings, parsed.force)
    folder = Path(parsed.into) / parsed.target
    after = _next(parsed.target, folder, settings.name or recipe.name, settings)
    if parsed.json:
        print(json.dumps({"recipe": recipe.name, "written": [str(path) for path in written], "next": after}))
        return 0
    print(f"recipe {recipe.name}   target {parsed.target}")
    for path in written:
        print(f"wrote  {path}")
    print(f"next   {after}")
    return 0


def _next(target: str, folder: Path, name: str, settings: DeployConfig) -> str:
    """The command that applies what was rendered."""
    if target == "docker":
        return f"docker compose -f {folder / 'docker-compose.yaml'} up --build"
    if target == "helm":
        files = f"{folder / 'recmill'} --values {folder / 'values.yaml'}"
        return f"helm install {name} {files} --namespace {settings.namespace}"
    overlay = folder / "overlays" / settings.storage.kind
    # Targets of several stages start with the storage, which must hold the log before the first stage.
    overlays = (overlay, overlay / "storage", folder / "base")
    begin = next(path for path in overlays if (path / "kustomization.yaml").exists())
    run = f" && kubectl create -f {folder / 'run.yaml'}" if target == "stack" else ""
    return f"kubectl apply -k {begin}{run}"
