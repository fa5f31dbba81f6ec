"""User-defined code in recipes: the owner of a recipe runs it freely; code named by a bundle must be trusted."""

from __future__ import annotations

from collections.abc import Collection

from recmill.errors import ArtifactError
from recmill.recipe.recipe import Feature, Label, Recipe
from recmill.recipe.steps import Function


def functions_of(recipe: Recipe) -> list[str]:
    """Every `package.module:function` that features and labels call."""
    entries: list[Feature | Label] = [*recipe.features, *recipe.labels]
    found = [step.path for entry in entries for step in entry.steps if isinstance(step, Function)]
    return list(dict.fromkeys(found))


def modules_of(recipe: Recipe) -> tuple[str, ...]:
    """The modules of these functions."""
    return tuple(dict.fromkeys(path.partition(":")[0] for path in functions_of(recipe)))


def check_trusted(recipe: Recipe, trusted: Collection[str], where: str) -> None:
    """Raise when a recipe calls a function of a module that is neither trusted nor in a trusted package."""
    wanted = [module for module in modules_of(recipe) if not _is_trusted(module, trusted)]
    if wanted:
        calls = [path for path in functions_of(recipe) if path.partition(":")[0] in wanted]
        raise ArtifactError(
            f"{where} calls {', '.join(calls)}, which would be imported here. Code that a bundle names runs only "
            f"if it is trusted: --trust-code {','.join(wanted)} on the command line, trust_code={wanted} in Python."
        )


def _is_trusted(module: str, trusted: Collection[str]) -> bool:
    return any(module == name or module.startswith(f"{name}.") for name in trusted)
