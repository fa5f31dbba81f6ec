"""The page about export: its Python runs as it stands."""

from __future__ import annotations

import re
from pathlib import Path

from recmill.artifacts.bundle.bundle import Bundle

PAGE = Path(__file__).parent.parent.parent / "docs" / "export.md"


def test_a_bundle_is_read_with_numpy_and_polars_as_the_page_shows(bundle: Bundle, capsys) -> None:
    code = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)[0]
    assert "runs/quickstart/bundle" in code
    names: dict[str, object] = {}
    exec(code.replace("runs/quickstart/bundle", str(bundle.path.parent)), names)
    assert names["items"]["item_id"].to_list() == bundle.items.column("item_id").to_list()  # type: ignore[index]
    assert "item_id" in capsys.readouterr().out


def test_every_file_of_a_bundle_is_on_the_page(bundle: Bundle) -> None:
    page = PAGE.read_text()
    folders = ("plan/", "tables/", "items/lists/", "users/lists/")
    names = [Path(name).name for name in bundle.manifest["files"] if not name.startswith(folders)]
    assert [name for name in names if name not in page] == []
