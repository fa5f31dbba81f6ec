"""Objects -> YAML that a person can review: keys as given, no aliases, scripts as literal blocks."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from recmill.errors import MissingPackage

try:
    import yaml
except ModuleNotFoundError:
    raise MissingPackage("`recmill deploy`", "pyyaml", "deploy") from None

# Numbers for readers of YAML 1.2, as Kubernetes is, that PyYAML, of YAML 1.1, would leave without quotes.
_NUMBER = re.compile(r"[-+]?(\.\d+|\d+(\.\d*)?)([eE][-+]?\d+)?|0[ox][0-9a-fA-F]+")


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        super().increase_indent(flow, False)  # lists stand further in than their key


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = "|" if "\n" in text else '"' if _NUMBER.fullmatch(text) else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _text)


def dumps(objects: Sequence[Mapping[str, Any]]) -> str:
    """One document for each object. The same objects give the same bytes."""
    return yaml.dump_all(
        objects, Dumper=_Dumper, sort_keys=False, width=10_000, explicit_start=len(objects) > 1
    )


def loads(text: str) -> list[Any]:
    """The objects of all documents."""
    return [found for found in yaml.safe_load_all(text) if found is not None]
