"""Code that a bundle names is not imported unless it is trusted."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest
from shop import Shop

import recmill
from recmill.artifacts.bundle.bundle import Bundle, publish_bundle
from recmill.artifacts.manifest import with_checksum, without_checksum
from recmill.cli import main
from recmill.errors import ArtifactError
from recmill.stages.serve.config import ServeConfig
from recmill.stages.serve.messages import Recommend
from recmill.stages.serve.service import Service

MODULE = "named_by_a_bundle"


@pytest.fixture
def bundle(shop: Shop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A bundle one of whose features calls a function of a module that can be imported."""
    package = tmp_path / "code"
    package.mkdir()
    (package / f"{MODULE}.py").write_text("def same(column):\n    return column\n")
    monkeypatch.syspath_prepend(str(package))
    monkeypatch.delitem(sys.modules, MODULE, raising=False)
    original = Bundle.open(shop.bundles)
    path = tmp_path / "versions" / original.version
    shutil.copytree(original.path, path)
    plan = without_checksum(json.loads((path / "plan" / "plan.json").read_text()))
    feature = next(one for one in plan["recipe"]["features"] if one["name"] == "position")
    feature["steps"].insert(0, {"function": {"path": f"{MODULE}:same", "type": "int"}})
    (path / "plan" / "plan.json").write_text(json.dumps(with_checksum(plan)))
    (path / "manifest.json").unlink()
    known = {key: value for key, value in original.manifest.items() if key not in ("kind", "format", "files")}
    publish_bundle(path, known)
    return path


def test_a_bundle_whose_code_is_not_trusted_is_refused_and_imports_nothing(bundle: Path) -> None:
    expected = f"calls {MODULE}:same, which would be imported here.*--trust-code {MODULE} "
    opened = Bundle.open(bundle)
    for _ in range(2):
        with pytest.raises(ArtifactError, match=expected):
            opened.plan  # noqa: B018
    with pytest.raises(ArtifactError, match=expected):
        recmill.open_bundle(bundle)
    with pytest.raises(ArtifactError, match=expected):
        Service(ServeConfig(bundle=bundle, watch=False))
    assert MODULE not in sys.modules


@pytest.mark.parametrize(
    "command",
    ["score --bundle B --table T --into O --scores", "load --bundle B --features redis://127.0.0.1:1"],
)
def test_commands_refuse_a_bundle_whose_code_is_not_trusted(
    bundle: Path, shop: Shop, tmp_path: Path, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    here = {"B": bundle, "T": shop.table, "O": tmp_path / "scores"}
    assert main([str(here.get(word, word)) for word in command.split()]) == 1
    assert f"calls {MODULE}:same, which would be imported here." in capsys.readouterr().err
    assert MODULE not in sys.modules


def test_bundles_are_shown_verified_and_compared_without_their_code(bundle: Path, shop: Shop) -> None:
    for act in (["show", bundle], ["verify", bundle], ["diff", bundle, shop.bundles]):
        assert not main(["bundle", *map(str, act)])
    assert MODULE not in sys.modules


def test_trusted_code_of_a_bundle_is_called(bundle: Path) -> None:
    answer = recmill.open_bundle(bundle, trust_code=[MODULE]).recommend(Recommend(context={"position": 3}))
    assert answer.items
    assert MODULE in sys.modules
    Service(ServeConfig(bundle=bundle, trust_code=(MODULE,), watch=False)).close()


def test_a_package_stands_for_its_modules(bundle: Path) -> None:
    with pytest.raises(ArtifactError, match="is trusted"):
        recmill.open_bundle(bundle, trust_code=["named_by"])


def test_what_is_trusted_must_be_modules(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--bundle", "b", "--trust-code", "a b"]) == 2
    assert "must be modules such as shop.features, got a b" in capsys.readouterr().err
