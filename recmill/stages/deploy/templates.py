"""Hand-written manifests with ${placeholders} -> files with the names, sizes and commands of one recipe.

Placeholders rather than fields that are set in loaded documents: a template reads like the manifest that it becomes,
and comments, order and layout reach the person who reviews it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import Any

from recmill.stages.deploy.settings import STORAGE
from recmill.stages.deploy.yaml import scalar

Files = dict[str, str]  # relative path -> content
Values = Mapping[str, Any]

# Lower case alone: ${RECMILL_RUNS} is the shell's, $(CPUS) is Kubernetes' and {{workflow.name}} is Argo's.
_PLACEHOLDER = re.compile(r"\$\{([a-z][a-z0-9_]*)\}")
_WHOLE_VALUE = re.compile(r"(?P<indent> *)(?P<key>[\w.-]+): \$\{(?P<name>[a-z][a-z0-9_]*)\}")
_PLAIN = re.compile(r"[\w./:@+=~%-]*", re.ASCII)  # means nothing to YAML inside of a longer text
_EACH = "overlays/each"
_BEFORE, _AFTER = " [{", " ,]}"


def read(path: str) -> str:
    """A file of the package, such as `chart/files/dashboard.json`."""
    return _package().joinpath(path).read_text(encoding="utf-8")


def files_in(folder: str) -> Files:
    """All files below a folder of the package, by their path in it."""
    return dict(_walk(_package().joinpath(folder), ""))


def render_folder(folder: str, values: Values) -> Files:
    """All templates of a folder of the package, filled; those of overlays/each once for each kind of storage."""
    rendered: Files = {}
    for name, text in files_in(folder).items():
        for kind in STORAGE if name.startswith(_EACH) else ("",):
            path = name.replace(_EACH, f"overlays/{kind}")
            rendered[path] = fill_file(name, text, {**values, "storage_kind": kind})
    return rendered


def fill_file(name: str, text: str, values: Values) -> str:
    """YAML is quoted where it must be; other files take values as they are."""
    return fill(text, values) if name.endswith((".yaml", ".yml")) else _fill_plain(text, values)


def fill(text: str, values: Values) -> str:
    """YAML with values for its placeholders. A line whose placeholder is None is left out."""
    lines = [_fill_line(line, values) for line in text.splitlines()]
    return "".join(f"{line}\n" for line in lines if line is not None)


def _package() -> Traversable:
    return files("recmill.stages.deploy")


def _walk(folder: Traversable, prefix: str) -> Iterator[tuple[str, str]]:
    for entry in sorted(folder.iterdir(), key=lambda entry: entry.name):
        if entry.is_dir():
            yield from _walk(entry, f"{prefix}{entry.name}/")
        else:
            yield prefix + entry.name, entry.read_text(encoding="utf-8")


def _fill_line(line: str, values: Values) -> str | None:
    names = _PLACEHOLDER.findall(line)
    if any(values[name] is None for name in names):
        return None
    whole = _WHOLE_VALUE.fullmatch(line)
    if whole and isinstance(values[whole["name"]], str) and "\n" in values[whole["name"]]:
        return _block(whole["indent"], whole["key"], values[whole["name"]])
    return _PLACEHOLDER.sub(lambda match: _written(match, values[match[1]]), line)


def _written(match: re.Match[str], value: Any) -> str:
    """As a value of YAML when the placeholder is one; inside of a longer text, as it is."""
    before, after = match.string[: match.start()][-1:], match.string[match.end() :][:1]
    if before in _BEFORE and after in _AFTER:
        return scalar(value)
    assert _PLAIN.fullmatch(str(value)), f"${{{match[1]}}} is a part of a text and cannot be quoted: {value}"
    return str(value)


def _block(indent: str, key: str, text: str) -> str:
    lines = [f"{indent}  {line}" if line else "" for line in text.splitlines()]
    return "\n".join([f"{indent}{key}: |", *lines])


def _fill_plain(text: str, values: Values) -> str:
    return _PLACEHOLDER.sub(lambda match: str(values[match[1]]), text)
