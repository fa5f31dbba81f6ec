"""Would a cluster take an object? Unknown fields, wrong types and unknown kinds are errors."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import kubernetes_validate
import referencing
from jsonschema import Draft202012Validator
from kubernetes_validate.utils import schema_contents
from schemas import SCHEMAS
from tools import helm, kustomize

from recmill.stages.deploy.yaml import loads

Object = dict[str, Any]

VERSIONS = ("1.31", "1.37")  # of Kubernetes: the oldest that we promise, and the newest that is known here
_NAME = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")
_LABEL_NAME = re.compile(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?")  # what a Service is called is a name in DNS
_LABEL_VALUE = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?")


class Invalid(AssertionError):
    """All that is wrong with some objects."""


def validate(objects: Sequence[Object]) -> None:
    """Raises Invalid with every problem of every object, each with the object's name and the path in it."""
    assert objects, "there is nothing to validate"
    problems = [f"{_called(one)}: {problem}" for one in objects for problem in problems_of(one)]
    if problems:
        raise Invalid("\n".join(problems))


def problems_of(one: Object) -> tuple[str, ...]:
    """What a cluster would not take, in one object. Overlays share objects, so that what was found is kept."""
    return _problems_of_text(json.dumps(one, sort_keys=True))


@cache
def _problems_of_text(text: str) -> tuple[str, ...]:
    one = json.loads(text)
    kind = (one.get("apiVersion"), one.get("kind"))
    by_schema = _problems_by(_validator(kind), one) if kind in SCHEMAS else _problems_of_kubernetes(one)
    return tuple(by_schema) or tuple(_problems_of_metadata(one))


def _called(one: Object) -> str:
    return f"{one.get('kind')}/{(one.get('metadata') or {}).get('name')}"


def _problems_of_kubernetes(one: Object) -> Iterator[str]:
    for version in VERSIONS:
        try:
            kubernetes_validate.validate(one, version, strict=True)
        except kubernetes_validate.ValidationError as error:
            yield _at(error.path, error.message)
            return
        except kubernetes_validate.SchemaNotFoundError:
            yield f"no kind of Kubernetes {version}, nor one of tests/deploy/schemas.py: {one.get('apiVersion')}"
            return


@cache
def _validator(kind: tuple[str, str]) -> Draft202012Validator:
    """Strict for a kind of an operator; what it has in common with pods is Kubernetes' own."""
    newest = kubernetes_validate.latest_version()
    path = f"kubernetes-json-schema/v{newest}-local-strict/_definitions.json"
    definitions = referencing.Resource.from_contents(schema_contents(path, newest))
    return Draft202012Validator(SCHEMAS[kind], registry=definitions @ referencing.Registry())


def _problems_by(validator: Draft202012Validator, one: Object) -> Iterator[str]:
    for error in validator.iter_errors(one):
        yield _at(error.absolute_path, error.message)


def _at(path: Sequence[Any], message: str) -> str:
    return f"{'.'.join(map(str, path)) or 'object'}: {message[:400]}"


def _problems_of_metadata(one: Object) -> Iterator[str]:
    """Names and labels, whose form the schemas leave open."""
    metadata = one.get("metadata") or {}
    name = str(metadata.get("name") or metadata.get("generateName", "").rstrip("-"))
    pattern = _LABEL_NAME if one.get("kind") == "Service" else _NAME
    if not pattern.fullmatch(name):
        yield f'metadata.name: "{name}" is no name of Kubernetes'
    for key, value in (metadata.get("labels") or {}).items():
        if not _LABEL_VALUE.fullmatch(str(value)):
            yield f'metadata.labels.{key}: "{value}" is no value of a label'


# what tools make of our files


def kustomized(folder: Path | str, tool: Sequence[str] | None = None) -> list[Object]:
    """The objects of a kustomization, as `kubectl apply -k` would send them."""
    return loads(_output([*(tool or kustomize()), str(folder)]))


def templated(
    chart: Path | str,
    values: Mapping[str, Any] | None = None,
    name: str = "recmill",
    namespace: str = "recmill",
    flags: Sequence[str] = (),
) -> list[Object]:
    """The objects of a Helm chart, as `helm install` would send them. `values` are a tree, as in values.yaml."""
    given = ["--values", "-"] if values else []
    command = [helm(), "template", name, str(chart), "--namespace", namespace, *given, *flags]
    return loads(_output(command, json.dumps(values) if values else None))


def _output(command: Sequence[str], given: str | None = None) -> str:
    done = subprocess.run(command, input=given, capture_output=True, text=True, timeout=120)
    if done.returncode != 0:
        raise Invalid(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout
