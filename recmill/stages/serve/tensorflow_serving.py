"""TensorFlow Serving's Predict, Classify and Regress for the ranking model, over gRPC and REST.

A request holds raw columns of the log: one tensor for each, `tf.Example`s, or JSON by row or by column. The outputs
are those of a canned binary classifier: `logistic` [n, 1], `probabilities` [n, 2], `class_ids` and `classes` [n, 1].
A ranker with several tasks has `score` and one output per task instead, [n, 1]. Versions are the bundle's steps.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import polars as pl

from recmill.dataset.batch import Array
from recmill.errors import BadRequest, NotFound
from recmill.stages.serve.inference import OUTPUT, Outputs, Scoring, ScoringRows
from recmill.stages.serve.limits import Limits, decode_json
from recmill.stages.serve.proto import convert
from recmill.stages.serve.proto import tensorflow_serving_pb2 as pb
from recmill.stages.serve.tensors import Shape, column_from_bytes, column_from_values, frame_of, list_column

SERVICE = "tensorflow.serving.PredictionService"

# dtype number in a tensor, name in the Open Inference Protocol, and field of the values
_TYPES = {
    1: ("FP32", "float_val"),
    2: ("FP64", "double_val"),
    3: ("INT32", "int_val"),
    4: ("UINT8", "int_val"),
    5: ("INT16", "int_val"),
    6: ("INT8", "int_val"),
    7: ("BYTES", "string_val"),
    9: ("INT64", "int64_val"),
    10: ("BOOL", "bool_val"),
    17: ("UINT16", "int_val"),
    22: ("UINT32", "uint32_val"),
    23: ("UINT64", "uint64_val"),
}
_FLOAT, _TEXT, _INT64 = 1, 7, 9
_EXAMPLE_INPUTS = {"examples", "inputs"}  # input of a model that takes serialised examples
_DEFAULT_SIGNATURES = ("", "serving_default")


@dataclass(frozen=True)
class ModelQuery:
    """The model, version and outputs that a request names."""

    name: str
    step: int | None
    outputs: tuple[str, ...] = ()


@dataclass(frozen=True)
class ModelAnswer:
    """Outputs by name, [n, ...] each, and the step of the version that answered."""

    name: str
    step: int
    outputs: dict[str, Array]


async def predict(
    scoring: Scoring, query: ModelQuery, frame: pl.DataFrame, remaining: float | None = None
) -> ModelAnswer:
    """The model's outputs for raw columns; raises NotFound when the request names a version that is not served."""
    version, scores = await scoring.score(query.name, "", ScoringRows(frame, ""), remaining)
    step = step_of(version)
    check_step(query, step)
    outputs = named_outputs(scores)
    for name in query.outputs:
        if name not in outputs:
            raise BadRequest(f'There is no output "{name[:60]}"; expected {", ".join(outputs)}.')
    return ModelAnswer(query.name, step, {name: outputs[name] for name in query.outputs or outputs})


def step_of(version: str) -> int:
    return int(version.partition("-")[0])


def check_step(query: ModelQuery, serving: int) -> None:
    if query.step not in (None, serving):
        raise NotFound(f"Version {query.step} of {query.name} is not served now; {serving} is.")


def named_outputs(scores: Outputs) -> dict[str, Array]:
    if OUTPUT not in scores:
        return {name: found[:, None] for name, found in scores.items()}
    positive = scores[OUTPUT][:, None]
    is_positive = (positive > 0.5).astype(np.int64)
    return {
        "logistic": positive,
        "probabilities": np.concatenate([1 - positive, positive], axis=1),
        "class_ids": is_positive,
        "classes": is_positive.astype("U1"),
    }


def _check_signature(name: str, expected: str) -> None:
    if name not in (*_DEFAULT_SIGNATURES, expected):
        raise NotFound(f'There is no signature "{name[:60]}"; expected {expected} or serving_default.')


# over gRPC


def predict_query(data: bytes, limits: Limits) -> tuple[ModelQuery, pl.DataFrame]:
    request = convert.parse(pb.PredictRequest, data)
    _check_signature(request.model_spec.signature_name, "predict")
    return _query(request.model_spec, tuple(request.output_filter)), _frame(request.inputs, limits)


def examples_query(data: bytes, kind: Any, signature: str) -> tuple[ModelQuery, pl.DataFrame]:
    """A Classify or Regress request."""
    request = convert.parse(kind, data)
    _check_signature(request.model_spec.signature_name, signature)
    given = getattr(request.input, request.input.WhichOneof("kind") or "example_list")
    shared = given.context.features.feature if isinstance(given, pb.Input.ExampleListWithContext) else {}
    return _query(request.model_spec), frame_of_examples(given.examples, shared)


def _query(spec: pb.ModelSpec, outputs: tuple[str, ...] = ()) -> ModelQuery:
    if spec.WhichOneof("version_choice") == "version_label":
        raise BadRequest(
            f'Versions have no labels here, got "{spec.version_label[:60]}". Give a number or none.'
        )
    step = spec.version.value if spec.WhichOneof("version_choice") == "version" else None
    return ModelQuery(spec.name, step, outputs)


def _frame(inputs: Mapping[str, pb.Tensor], limits: Limits) -> pl.DataFrame:
    if len(inputs) == 1 and (name := next(iter(inputs))) in _EXAMPLE_INPUTS and inputs[name].dtype == _TEXT:
        return frame_of_examples([convert.parse(pb.Example, text) for text in inputs[name].string_val])
    return frame_of([_column(name, tensor, limits) for name, tensor in sorted(inputs.items())])


def _column(name: str, tensor: pb.Tensor, limits: Limits) -> pl.Series:
    if tensor.dtype not in _TYPES:
        expected = ", ".join(f"{number} ({datatype})" for number, (datatype, _) in _TYPES.items())
        raise BadRequest(f'Input "{name}" has the dtype {tensor.dtype}; expected one of {expected}.')
    datatype, field = _TYPES[tensor.dtype]
    shape = Shape.of(name, [dim.size for dim in tensor.tensor_shape.dim])
    length = shape.num_values
    if tensor.tensor_content:
        return shape.column(column_from_bytes(name, datatype, length, tensor.tensor_content))
    values = list(getattr(tensor, field))
    if 0 < len(values) < length <= limits.max_body // 8:
        values += values[-1:] * (length - len(values))  # the last value repeats for the rest
    return shape.column(column_from_values(name, datatype, length, values))


def frame_of_examples(
    examples: Sequence[pb.Example], shared: Mapping[str, pb.Feature] | None = None
) -> pl.DataFrame:
    """One row per example; a feature that an example lacks is missing in its row."""
    rows = [{**(shared or {}), **example.features.feature} for example in examples]
    names = sorted({name for row in rows for name in row})
    return frame_of([_example_column(name, [row.get(name) for row in rows]) for name in names])


_DATATYPES = {"bytes_list": "BYTES", "float_list": "FP64", "int64_list": "INT64"}


def _example_column(name: str, features: Sequence[pb.Feature | None]) -> pl.Series:
    kinds = {kind for one in features if one is not None and (kind := one.WhichOneof("kind"))}
    if len(kinds) > 1:
        raise BadRequest(
            f'Feature "{name}" must be of one kind in all examples, got {", ".join(sorted(kinds))}.'
        )
    kind = next(iter(kinds), "bytes_list")
    values = [list(getattr(one, kind).value) if one is not None else [] for one in features]
    return _values_or_lists(name, _DATATYPES[kind], values)


def _values_or_lists(name: str, datatype: str, values: Sequence[Sequence[Any]]) -> pl.Series:
    """One value per row, missing where there is none; lists, if any row has several values."""
    lengths = np.array([len(row) for row in values], np.int64)
    if (lengths <= 1).all():
        return column_from_values(name, datatype, len(values), [row[0] if row else None for row in values])
    together = [one for row in values for one in row]
    return list_column(column_from_values(name, datatype, len(together), together), lengths, lengths)


def predict_reply(answer: ModelAnswer) -> pb.PredictResponse:
    outputs = {name: _tensor(values) for name, values in answer.outputs.items()}
    return pb.PredictResponse(outputs=outputs, model_spec=_spec(answer, "predict"))


def classify_reply(answer: ModelAnswer) -> pb.ClassificationResponse:
    kind = pb.ClassificationResponse
    rows = [
        kind.Classifications(classes=[kind.Class(label=label, score=score) for label, score in row])
        for row in classes_of(answer)
    ]
    return kind(result=kind.Result(classifications=rows), model_spec=_spec(answer, "classification"))


def regress_reply(answer: ModelAnswer) -> pb.RegressionResponse:
    kind = pb.RegressionResponse
    regressions = [kind.Regression(value=value) for value in values_of(answer)]
    return kind(result=kind.Result(regressions=regressions), model_spec=_spec(answer, "regression"))


def classes_of(answer: ModelAnswer) -> list[list[tuple[str, float]]]:
    """Label and score of each class, for each row; the tasks of a ranker with several tasks are its classes."""
    names, columns = list(answer.outputs), list(answer.outputs.values())
    if "probabilities" in answer.outputs:
        names, columns = ["0", "1"], list(answer.outputs["probabilities"].T)
    scores = np.stack([column.reshape(-1) for column in columns], axis=1)
    return [list(zip(names, row, strict=True)) for row in scores.tolist()]


def values_of(answer: ModelAnswer) -> list[float]:
    """One value per row: the probability, or the score that orders items."""
    values: list[float] = next(iter(answer.outputs.values())).reshape(-1).tolist()
    return values


def _spec(answer: ModelAnswer, signature: str) -> pb.ModelSpec:
    return pb.ModelSpec(name=answer.name, version=pb.Version(value=answer.step), signature_name=signature)


def _tensor(values: Array) -> pb.Tensor:
    shape = pb.TensorShape(dim=[pb.TensorShape.Dim(size=size) for size in values.shape])
    flat = values.reshape(-1).tolist()
    if values.dtype.kind == "U":
        return pb.Tensor(dtype=_TEXT, tensor_shape=shape, string_val=[text.encode() for text in flat])
    if values.dtype.kind == "i":
        return pb.Tensor(dtype=_INT64, tensor_shape=shape, int64_val=flat)
    return pb.Tensor(dtype=_FLOAT, tensor_shape=shape, float_val=flat)


# over REST


class RestRequest(msgspec.Struct):
    """Rows by row (`instances`, or `examples` to classify) or by column (`inputs`)."""

    instances: list[dict[str, Any]] | None = None
    inputs: dict[str, list[Any]] | None = None
    examples: list[dict[str, Any]] | None = None
    context: dict[str, Any] = {}
    signature_name: str = ""


_decoder = msgspec.json.Decoder(RestRequest)


def read_rest(body: bytes, method: str, limits: Limits) -> tuple[bool, pl.DataFrame]:
    """Whether the answer is expected by row, and the raw columns."""
    limits.check_json(body)
    request = decode_json(_decoder, body)
    _check_signature(request.signature_name, _SIGNATURES[method])
    rows = request.instances if method == "predict" else request.examples
    if rows is not None:
        return True, _frame_of_rows([{**request.context, **row} for row in rows])
    if method == "predict" and request.inputs is not None:
        return False, frame_of([_json_column(name, values) for name, values in request.inputs.items()])
    expected = '"instances" or "inputs"' if method == "predict" else '"examples"'
    raise BadRequest(f"The body must have {expected}.")


_SIGNATURES = REST_METHODS = {"predict": "predict", "classify": "classification", "regress": "regression"}


def _frame_of_rows(rows: Sequence[Mapping[str, Any]]) -> pl.DataFrame:
    names = dict.fromkeys(name for row in rows for name in row)
    return frame_of([_json_column(name, [row.get(name) for row in rows]) for name in names])


def _json_column(name: str, values: Sequence[Any]) -> pl.Series:
    rows = [[_json_value(name, one) for one in (row if isinstance(row, list) else [row])] for row in values]
    return _values_or_lists(name, _datatype(one for row in rows for one in row), rows)


def _json_value(name: str, value: Any) -> Any:
    if isinstance(value, dict) and set(value) == {"b64"}:
        try:
            return base64.b64decode(value["b64"], validate=True)
        except (TypeError, ValueError, binascii.Error):
            raise BadRequest(f'Input "{name}" has a b64 that is not base64.') from None
    if isinstance(value, list | dict):
        raise BadRequest(
            f'Input "{name}" must have one value or a list of values a row, got {str(value)[:40]}.'
        )
    return value


def _datatype(values: Iterable[Any]) -> str:
    kinds = {type(value) for value in values if value is not None}
    if kinds & {str, bytes}:
        return "BYTES"
    return "BOOL" if kinds == {bool} else "FP64" if float in kinds else "INT64"


def rest_answer(method: str, by_row: bool, answer: ModelAnswer) -> dict[str, Any]:
    if method == "classify":
        return {"result": classes_of(answer)}
    if method == "regress":
        return {"result": values_of(answer)}
    columns = {name: values.tolist() for name, values in answer.outputs.items()}
    if not by_row:
        return {"outputs": columns}
    rows = zip(*columns.values(), strict=True)
    return {"predictions": [dict(zip(columns, row, strict=True)) for row in rows]}


def rest_status(version: str) -> dict[str, Any]:
    status = {"error_code": "OK", "error_message": ""}
    entry = {"version": str(step_of(version)), "state": "AVAILABLE", "status": status}
    return {"model_version_status": [entry]}


def rest_metadata(scoring: Scoring, name: str) -> dict[str, Any]:
    """The signature of Predict."""
    model = scoring.model(name)
    inputs = {one.name: _tensor_info(one.name, one.datatype, one.shape) for one in model.inputs}
    empty = named_outputs({one.name: np.empty(0, np.float32) for one in model.outputs})
    outputs = {key: _output_info(key, values) for key, values in empty.items()}
    signature = {"inputs": inputs, "outputs": outputs, "method_name": "tensorflow/serving/predict"}
    spec = {"name": name, "signature_name": "", "version": str(step_of(model.versions[0]))}
    signatures = {"signature_def": {"predict": signature, "serving_default": signature}}
    return {"model_spec": spec, "metadata": {"signature_def": signatures}}


def _output_info(name: str, values: Array) -> dict[str, Any]:
    datatype = {"U": "BYTES", "i": "INT64"}.get(values.dtype.kind, "FP32")
    return _tensor_info(name, datatype, [-1, values.shape[1]])


_DTYPE_NAMES = {
    "BYTES": "DT_STRING",
    "FP32": "DT_FLOAT",
    "FP64": "DT_DOUBLE",
    "INT64": "DT_INT64",
    "BOOL": "DT_BOOL",
}


def _tensor_info(name: str, datatype: str, shape: Sequence[int]) -> dict[str, Any]:
    dims = [{"size": str(size), "name": ""} for size in shape]
    return {
        "name": name,
        "dtype": _DTYPE_NAMES[datatype],
        "tensor_shape": {"dim": dims, "unknown_rank": False},
    }
