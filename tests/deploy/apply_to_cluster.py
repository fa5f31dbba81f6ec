"""`make cluster-test`: applies every rendered target to the API server of KUBECONFIG, in a namespace made for it.

First all of a target as a dry run of the server, then really. Kinds of operators that the cluster lacks are named and
left out. Nothing is waited for: images need not be there.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tools import kustomize
from validate import kustomized, templated

from recmill.recipe.load import load_recipe
from recmill.stages.deploy.deploy import TARGETS, deploy
from recmill.stages.deploy.settings import DeployConfig

Object = dict[str, Any]
PARTS = ("redis.enabled=true", "redis.replicas=3", "serve.split=true", "monitoring.enabled=true")
CHOICES: tuple[tuple[str, ...], ...] = (
    (),
    PARTS,
    ("publish.url=s3://models/shop/bundle", "publish.secret=s3"),
)


def main() -> int:
    if not os.environ.get("KUBECONFIG"):
        print("skipped  KUBECONFIG names no cluster: nothing was applied. Set it to that of a test cluster")
        return 0
    if shutil.which("kubectl") is None:
        sys.exit("kubectl is missing: it applies what is rendered. Install it")
    namespace = f"recmill-test-{uuid.uuid4().hex[:8]}"
    kubectl(["create", "namespace", namespace])
    problems = 0
    try:
        lacking = lacking_kinds()
        with tempfile.TemporaryDirectory() as folder:
            for name, objects in rendered(namespace, Path(folder)):
                problems += not applied(name, objects, namespace, lacking)
    finally:
        kubectl(["delete", "namespace", namespace, "--wait=false"])
    print(f"{'FAIL' if problems else 'pass'}  {problems} overlays were refused")
    return 1 if problems else 0


def rendered(namespace: str, folder: Path) -> Iterator[tuple[str, list[Object]]]:
    """Name and objects of every overlay of every target, and of the chart."""
    recipe = load_recipe("quickstart")
    for number, pairs in enumerate(CHOICES):
        settings = DeployConfig.of([f"namespace={namespace}", *pairs])
        for target in sorted(TARGETS.keys() - {"docker"}):
            into = folder / str(number)
            deploy(recipe, target, into, settings)
            if target == "helm":
                values = ["--values", str(into / "helm/values.yaml")]
                yield f"helm {pairs}", templated(into / "helm/recmill", None, "quickstart", namespace, values)
            overlays = sorted((into / target).rglob("overlays/*/**/kustomization.yaml"))
            for path in overlays or sorted((into / target).glob("base/kustomization.yaml")):
                yield f"{path.parent.relative_to(into)} {pairs}", kustomized(path.parent, kustomize())


def applied(name: str, objects: Sequence[Object], namespace: str, lacking: set[str]) -> bool:
    """Whether the API server took all of them; they are removed again."""
    here = [one for one in objects if one["apiVersion"] not in lacking]
    left_out = sorted({one["kind"] for one in objects} - {one["kind"] for one in here})
    text = json.dumps(
        {"apiVersion": "v1", "kind": "List", "items": [in_namespace(one, namespace) for one in here]}
    )
    done = [kubectl(["apply", "--filename=-", *flags], text) for flags in (["--dry-run=server"], [])]
    kubectl(["delete", "--filename=-", "--ignore-not-found", "--wait=true", "--timeout=60s"], text)
    errors = "".join(dict.fromkeys(one.stderr for one in done if one.returncode))
    print(
        f"{'FAIL' if errors else 'pass'}  {name}   {len(here)} objects   left out: {', '.join(left_out) or 'none'}"
    )
    print(errors, end="")
    return not errors


def in_namespace(one: Object, namespace: str) -> Object:
    """As Helm does when it installs: its templates name no namespace."""
    if one["kind"] == "PersistentVolume":
        return one
    return {**one, "metadata": {"namespace": namespace, **one["metadata"]}}


def lacking_kinds() -> set[str]:
    """API versions of operators that the cluster does not serve."""
    served = kubectl(["api-versions"]).stdout.split()
    wanted = {"argoproj.io/v1alpha1", "monitoring.coreos.com/v1", "ray.io/v1", "sparkoperator.k8s.io/v1beta2"}
    return wanted - set(served)


def kubectl(arguments: Sequence[str], text: str | None = None) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(["kubectl", *arguments], input=text, capture_output=True, text=True, timeout=180)
    if done.returncode and text is None:
        sys.exit(f"kubectl {' '.join(arguments)}: {done.stderr}")
    return done


if __name__ == "__main__":
    sys.exit(main())
