"""deploy: a recipe -> reviewable manifests of Kubernetes, Argo, Ray and Spark, and files of Docker."""

from __future__ import annotations

import hashlib
import importlib
import json
from pathlib import Path

from recmill.artifacts.lock import lock_folder
from recmill.artifacts.manifest import write_whole
from recmill.recipe.names import nearest
from recmill.recipe.recipe import Recipe
from recmill.stages.deploy.settings import DeployConfig, DeployError

Files = dict[str, str]  # relative path -> content

RENDERED = "rendered.json"  # digests of what was rendered, by which changes by hand are seen
# Target -> its module, which is imported when it is rendered: PyYAML is an optional package.
TARGETS = {
    "train-job": "train_job",
    "stack": "stack",
    "pipeline": "pipeline",
    "serve": "serve",
    "helm": "helm",
    "ray": "ray",
    "spark": "spark",
    "docker": "docker",
}


def deploy(
    recipe: Recipe, target: str, into: Path, settings: DeployConfig, force: bool = False
) -> list[Path]:
    """Render a target into `into/<target>`; the files that were written.

    A file that was changed by hand since is not overwritten: nothing is written then, unless `force`.
    """
    files = render(recipe, target, settings)
    with lock_folder(into / target):
        return write_rendered(into / target, files, force)


def render(recipe: Recipe, target: str, settings: DeployConfig) -> Files:
    """The files of a target, not written anywhere."""
    if target not in TARGETS:
        raise DeployError("--target", [f'there is no target "{target}"{nearest(target, TARGETS)}'])
    module = importlib.import_module(f"recmill.stages.deploy.{TARGETS[target]}")
    files: Files = module.render(recipe, settings)
    return files


def write_rendered(folder: Path, files: Files, force: bool = False) -> list[Path]:
    """Write files, with their digests beside them. Files that were rendered before and are not now are removed."""
    before = _digests_before(folder)
    changed = [] if force else _changed_by_hand(folder, files, before)
    if changed:
        raise DeployError(
            str(folder),
            [f"{name} was changed by hand. Keep a copy and add --force to overwrite it" for name in changed],
        )
    for name in sorted(before.keys() - files.keys()):
        (folder / name).unlink(missing_ok=True)
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        write_whole(folder / name, content)
    digests = {name: _digest(files[name].encode()) for name in sorted(files)}
    write_whole(folder / RENDERED, json.dumps(digests, indent=1) + "\n")
    return [folder / name for name in files]


def _digests_before(folder: Path) -> dict[str, str]:
    try:
        digests: dict[str, str] = json.loads((folder / RENDERED).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise DeployError(str(folder / RENDERED), [f"is not valid JSON: {error}. Remove it"]) from None
    return digests


def _changed_by_hand(folder: Path, files: Files, before: dict[str, str]) -> list[str]:
    """Files that are neither as they were rendered nor as they would be now."""
    changed = []
    for name in sorted(before.keys() | files.keys()):
        path = folder / name
        if not path.exists():
            continue
        here = _digest(path.read_bytes())
        if here != before.get(name) and (name not in files or here != _digest(files[name].encode())):
            changed.append(name)
    return changed


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
