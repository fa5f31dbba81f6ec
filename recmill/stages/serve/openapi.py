"""The OpenAPI document, generated from the messages, the table of calls, the limits and the recipe's columns."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import msgspec

from recmill import __version__
from recmill.recipe.kinds import LIST_OF
from recmill.stages.serve import calls as c
from recmill.stages.serve import inference
from recmill.stages.serve import messages as m
from recmill.stages.serve import tensorflow_serving as tfs
from recmill.stages.serve.http_routes import JSON
from recmill.stages.serve.limits import (
    IDS,
    INTEGERS,
    LARGEST_BOOST,
    MAX_DEADLINE_MS,
    MAX_IDS,
    MAX_TEXT,
    SMALLEST_BOOST,
    Limits,
)
from recmill.stages.serve.raw import RawColumns

if TYPE_CHECKING:
    from recmill.artifacts.bundle.bundle import Bundle

Schema = dict[str, Any]
_REF = "#/components/schemas/{name}"
_REFUSALS = {
    "400": "The request is invalid.",
    "401": "The token is missing or unknown.",
    "403": "The token lacks the scope.",
    "404": "The request names something that does not exist.",
    "408": "The body did not arrive in time.",
    "409": "What is on disk cannot be served.",
    "413": "The body is too large.",
    "415": "The body has an unsupported type.",
    "429": "Overloaded: retry later.",
    "503": "A feature store does not answer.",
    "504": "The deadline passed.",
}
_OWNERS = {"context": ("user", "context"), "features": ("user", "context")}
_VALUES = {"Event": ("user", "item", "context"), "NewItem": ("item",)}
_REQUESTS = (
    *("Recommend", "Rank", "Recall", "Boost", "Similar", "Trending", "Features"),
    *("Event", "NewItem", "ItemIds", "RollBack"),
)


def document(bundle: Bundle, limits: Limits, role: str = "all", has_tokens: bool = False) -> Schema:
    """The OpenAPI document of this server."""
    endpoints = [call for call in c.CALLS.values() if call.endpoint is not None]
    kinds = {kind for call in endpoints for kind in _kinds(call)} | {m.Refusal}
    kinds |= {
        inference.Inference,
        inference.InferenceResult,
        inference.ServerFacts,
        inference.ModelFacts,
        inference.Readiness,
        tfs.RestRequest,
    }
    _, schemas = msgspec.json.schema_components(
        sorted(kinds, key=lambda kind: kind.__name__), ref_template=_REF
    )
    _narrow(schemas, bundle, limits)
    paths: Schema = {}
    for call in endpoints:
        if role in call.roles and call.endpoint is not None:
            method, path = call.endpoint
            paths.setdefault(path, {})[method.lower()] = _operation(call, method, schemas)
    paths |= _plain_paths()
    if role in c.INFER_ROLES and inference.MODEL in bundle.models:
        paths |= _inference_paths(bundle.version)
    schema: Schema = {
        "openapi": "3.1.0",
        "info": {
            "title": "recmill",
            "version": __version__,
            "description": f"Answers from bundle {bundle.version}.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "paths": paths,
        "components": {"schemas": schemas},
    }
    if has_tokens:
        schema["components"]["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
        schema["security"] = [{"token": []}]
    return schema


def _kinds(call: c.ServerCall) -> Iterable[type]:
    kinds = (call.takes, call.takes_many, call.answers, call.answers_many)
    return (kind for kind in kinds if kind is not None)


def _ref(kind: type) -> Schema:
    return {"$ref": _REF.format(name=kind.__name__)}


def _either(*kinds: type | None) -> Schema:
    schemas = [_ref(kind) for kind in kinds if kind is not None]
    return schemas[0] if len(schemas) == 1 else {"anyOf": schemas}


def _content(schema: Schema) -> Schema:
    return {"content": {JSON: {"schema": schema}}}


def _responses(schema: Schema, *refusals: str) -> Schema:
    return {
        "200": {"description": "The answer.", **_content(schema)},
        **{code: {"description": _REFUSALS[code], **_content(_ref(m.Refusal))} for code in refusals},
    }


def _operation(call: c.ServerCall, method: str, schemas: Schema) -> Schema:
    body = ("408", "413", "415") if method == "POST" else ()
    refusals = ("400", "401", "403", "404", *body, "409", "429", "503", "504")
    operation: Schema = {
        "operationId": call.name,
        "summary": call.summary,
        "responses": _responses(_either(call.answers, call.answers_many), *sorted(refusals)),
    }
    if method == "POST":
        operation["requestBody"] = {"required": True, **_content(_either(call.takes, call.takes_many))}
    elif properties := schemas[call.takes.__name__]["properties"]:
        operation["parameters"] = [
            {"name": name, "in": "query", "required": False, "schema": schema}
            for name, schema in properties.items()
        ]
    return operation


# bounds that the message types do not have


def _narrow(schemas: Schema, bundle: Bundle, limits: Limits) -> None:
    """Bounds of numbers and lists, and the columns of this bundle's recipe."""
    columns, ids = RawColumns(bundle.recipe), (bundle.recipe.log.user, bundle.recipe.log.item)
    for name, schema in schemas.items():
        for field, found in schema.get("properties", {}).items():
            if name in (*_REQUESTS, "UserPrefix"):
                _narrow_field(name, field, found, limits)
            if field in _OWNERS and name in _REQUESTS:
                schema["properties"][field] = _columns(columns, _OWNERS[field], ids)
    for name, owners in _VALUES.items():
        schemas[name]["properties"]["values"] = _columns(columns, owners, ids)
    for name, field in (
        ("Recommends", "queries"),
        ("Recalls", "queries"),
        ("Events", "events"),
        ("NewItems", "items"),
    ):
        schemas[name]["properties"][field] |= {"minItems": 1, "maxItems": limits.max_batch}


def _narrow_field(request: str, field: str, schema: Schema, limits: Limits) -> None:
    bounds = limits.range_of(request, field) or INTEGERS
    for part in schema.get("anyOf", [schema]):
        if (request, field) == ("Boost", "factor"):
            part |= {"minimum": SMALLEST_BOOST, "maximum": LARGEST_BOOST}
        elif field == "deadline_ms" and part.get("type") == "number":
            part |= {"exclusiveMinimum": 0, "maximum": MAX_DEADLINE_MS}
        elif part.get("type") == "array":
            part["maxItems"] = limits.longest().get(field, MAX_IDS)
            _narrow_field(request, "", part["items"], limits)
        elif part.get("type") == "string":
            part |= {"maxLength": MAX_TEXT, "minLength": int((request, field) in IDS)}
        elif part.get("type") == "integer":
            part["minimum"], part["maximum"] = bounds


_KINDS: dict[str, Schema] = {
    "text": {"type": ["string", "integer"]},
    "int": {"type": ["integer", "string", "boolean"], "minimum": INTEGERS[0], "maximum": INTEGERS[1]},
    "float": {"type": "number"},
    "bool": {"type": "boolean"},
}


def _columns(columns: RawColumns, owners: tuple[str, ...], ids: tuple[str | None, ...]) -> Schema:
    """Raw columns of some owners. Ids have fields of their own."""
    properties = {name: _column(columns.kinds[name]) for name in columns.of(*owners) if name not in ids}
    return {"type": "object", "properties": properties, "additionalProperties": False, "default": {}}


def _column(kind: str) -> Schema:
    one = {"anyOf": [_KINDS[kind.removeprefix(LIST_OF)], {"type": "null"}]}
    if not kind.startswith(LIST_OF):
        return one
    return {"anyOf": [{"type": "array", "items": one, "maxItems": 10_000}, {"type": "null"}]}


# paths that are not in the table of calls


def _get(name: str, summary: str, schema: Schema, *refusals: str) -> Schema:
    return {"get": {"operationId": name, "summary": summary, "responses": _responses(schema, *refusals)}}


def _plain_paths() -> Schema:
    ready: Schema = {
        "type": "object",
        "properties": {"ready": {"type": "boolean"}},
        "required": ["ready"],
    }
    is_ready = _get("is_ready", "Whether the server takes requests.", ready)
    is_ready["get"]["responses"]["503"] = {"description": "Not ready yet, or draining.", **_content(ready)}
    is_live = _get("is_live", "Whether the process is alive.", {"type": "object"})
    metrics = _get("metrics", "Prometheus metrics.", {}, "401", "403")
    metrics["get"]["responses"]["200"]["content"] = {"text/plain": {"schema": {"type": "string"}}}
    return {
        "/v1/live": _get("live", "The last two minutes, by second.", {"type": "object"}, "401", "403"),
        "/health/live": is_live,
        "/health/ready": is_ready,
        "/metrics": metrics,
    }


def _inference_paths(version: str) -> Schema:
    paths: Schema = {
        "/v2": _get("server", "The Open Inference Protocol's server.", _ref(inference.ServerFacts), "401")
    }
    for suffix, more in (("", []), ("/versions/{version}", [("version", version)])):
        path = f"/v2/models/{{name}}{suffix}"
        number = suffix and "_version"
        parameters = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string", "enum": [value]}}
            for name, value in [("name", inference.MODEL), *more]
        ]
        model = _get(
            f"model{number}", "Inputs and outputs of a model.", _ref(inference.ModelFacts), "401", "404"
        )
        is_ready = _get(
            f"model_ready{number}", "Whether the model is ready.", _ref(inference.Readiness), "401", "404"
        )
        is_ready["get"]["responses"]["503"] = {
            "description": "Not yet.",
            **_content(_ref(inference.Readiness)),
        }
        refusals = ("400", "401", "404", "408", "413", "415", "429", "503", "504")
        infer = {
            "operationId": f"infer{number}",
            "summary": "Score raw rows of the log.",
            "requestBody": {"required": True, **_content(_ref(inference.Inference))},
            "responses": _responses(_ref(inference.InferenceResult), *refusals),
        }
        for operation, tail in ((model, ""), (is_ready, "/ready"), ({"post": infer}, "/infer")):
            paths[path + tail] = {**operation, "parameters": parameters}
    return paths | _tensorflow_serving_paths()


def _tensorflow_serving_paths() -> Schema:
    path = "/v1/models/{name}"
    name = {
        "name": "name",
        "in": "path",
        "required": True,
        "schema": {"type": "string", "enum": [inference.MODEL]},
    }
    paths: Schema = {
        path: _get("tf_status", "TensorFlow Serving's status of a model.", {"type": "object"}, "401", "404"),
        f"{path}/metadata": _get("tf_metadata", "Its signature.", {"type": "object"}, "401", "404"),
    }
    refusals = ("400", "401", "404", "408", "413", "415", "429", "503", "504")
    for method in tfs.REST_METHODS:
        paths[f"{path}:{method}"] = {
            "post": {
                "operationId": f"tf_{method}",
                "summary": f"TensorFlow Serving's {method} for raw rows of the log.",
                "requestBody": {"required": True, **_content(_ref(tfs.RestRequest))},
                "responses": _responses({"type": "object"}, *refusals),
            }
        }
    return {path: {**operations, "parameters": [name]} for path, operations in paths.items()}
