"""Objects -> YAML that a person can review: keys as given, no aliases, strings that look like numbers quoted."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from recmill.errors import MissingPackage

try:
    import yaml
except ModuleNotFoundError:
    raise MissingPackage("`recmill deploy`", "pyyaml", "deploy") from None

# Numbers for readers of YAML 1.2, as Kubernetes is, that PyYAML, of YAML 1.1, would leave without quotes.
_NUMBER = re.compile(r"[-+]?(\.\d+|\d+(\.\d*)?)([eE][-+]?\d+)?|0[ox][0-9a-fA-F]+")
_WIDE = 100_000  # a value is never folded


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = '"' if "\n" in text or _NUMBER.fullmatch(text) else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _represent_text)


def dump(value: Mapping[str, Any]) -> str:
    """One document. The same value gives the same bytes."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, width=_WIDE)


def scalar(value: Any) -> str:
    """A value on one line, right wherever a value may stand, also inside of brackets."""
    listed = yaml.dump([value], Dumper=_Dumper, sort_keys=False, width=_WIDE, default_flow_style=True)
    return listed.strip()[1:-1]


def loads(text: str) -> list[Any]:
    """The objects of all documents."""
    return [document for document in yaml.safe_load_all(text) if document is not None]
