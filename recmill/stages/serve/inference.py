"""The Open Inference Protocol, version 2: raw columns of the log as tensors in, click probabilities out.

A ranker with several tasks has one output per task, and `score`, by which the server orders items.

A tensor has the shape [n] or [n, 1], or [n, length] for a column of lists. A missing value is an empty text, NaN, or
null in JSON; a column that is not sent is missing in every row. A list ends where only missing values follow, or
after NAME.lengths [n] values if that input is sent.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import numpy as np
import polars as pl

from recmill import __version__
from recmill.dataset.batch import Array
from recmill.errors import BadRequest, NotFound
from recmill.recipe.kinds import element_of, is_list, kinds_of_columns
from recmill.stages.serve.batcher import Batcher
from recmill.stages.serve.calls import INFER_ROLES, CallDispatcher
from recmill.stages.serve.limits import MAX_DEADLINE_MS, Limits, decode_json
from recmill.stages.serve.proto import convert
from recmill.stages.serve.proto import predict_v2_pb2 as pb
from recmill.stages.serve.tensors import LENGTHS, Shape, column_from_bytes, column_from_values, frame_of

if TYPE_CHECKING:
    from recmill.artifacts.bundle.bundle import Bundle

MODEL = "ranking"
OUTPUT = "probability"
SCORE = "score"
Outputs = dict[str, Array]  # by name, float32 [n]
EXTENSIONS = ("binary_tensor_data",)

Datatype = Literal[
    "BOOL", "INT8", "INT16", "INT32", "INT64", "UINT8", "UINT16", "UINT32", "UINT64", "FP32", "FP64", "BYTES"
]
_CONTENTS = {
    "BOOL": "bool_contents",
    "INT8": "int_contents",
    "INT16": "int_contents",
    "INT32": "int_contents",
    "INT64": "int64_contents",
    "UINT8": "uint_contents",
    "UINT16": "uint_contents",
    "UINT32": "uint_contents",
    "UINT64": "uint64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
    "BYTES": "bytes_contents",
}
_DATATYPE_OF_KIND: dict[str, Datatype] = {"text": "BYTES", "int": "INT64", "float": "FP64", "bool": "BOOL"}


class ProtocolMessage(msgspec.Struct, omit_defaults=True):
    """A message of the protocol. Unknown fields belong to extensions and are ignored."""


class Tensor(ProtocolMessage):
    """One raw column. `data` is absent when the values follow the JSON as bytes."""

    name: str
    shape: list[int]
    datatype: Datatype
    data: list[Any] | None = None
    parameters: dict[str, Any] = {}


class WantedOutput(ProtocolMessage):
    name: str
    parameters: dict[str, Any] = {}


class Inference(ProtocolMessage):
    """Rows to score."""

    inputs: list[Tensor]
    id: str | None = None
    outputs: list[WantedOutput] = []
    parameters: dict[str, Any] = {}


class InferenceResult(ProtocolMessage):
    """Scores, in the order of the rows."""

    model_name: str
    model_version: str
    outputs: list[Tensor]
    id: str | None = None


class TensorFacts(ProtocolMessage):
    name: str
    datatype: Datatype
    shape: list[int]


class ServerFacts(ProtocolMessage):
    name: str
    version: str
    extensions: list[str]


class ModelFacts(ProtocolMessage):
    name: str
    versions: list[str]
    platform: str
    inputs: list[TensorFacts]
    outputs: list[TensorFacts]


class Readiness(ProtocolMessage):
    """Whether the model of this name is ready."""

    name: str
    ready: bool


@dataclass(frozen=True)
class ScoringRows:
    """Raw columns to score, and the requested form of the answer."""

    frame: pl.DataFrame
    id: str
    seconds: float | None = None
    in_bytes: bool = False
    outputs: tuple[str, ...] = ()  # requested outputs; all when empty


class Scoring:
    """Scores rows for both transports; requests that arrive together share a batch."""

    def __init__(self, dispatcher: CallDispatcher, model_name: str | None = None) -> None:
        self.dispatcher = dispatcher
        self.model_name = model_name
        self.batcher: Batcher[pl.DataFrame, tuple[str, Outputs]] = Batcher(dispatcher.queue, self._score_all)

    def server(self) -> ServerFacts:
        return ServerFacts(name="recmill", version=__version__, extensions=list(EXTENSIONS))

    def model(self, name: str, version: str = "") -> ModelFacts:
        """Inputs and outputs of the model; raises NotFound when there is no such model or version."""
        bundle = self._bundle(name, version)
        return ModelFacts(
            name=MODEL,
            versions=[bundle.version],
            platform="recmill",
            inputs=inputs_of(bundle),
            outputs=[TensorFacts(name=name, datatype="FP32", shape=[-1]) for name in outputs_of(bundle)],
        )

    def is_ready(self, name: str, version: str = "") -> bool:
        self._bundle(name, version)
        return self.dispatcher.is_ready

    async def score(
        self, name: str, version: str, rows: ScoringRows, remaining: float | None = None
    ) -> tuple[str, Outputs]:
        """The version that answers, and float32 [n] of each requested output."""
        bundle = self._bundle(name, version)
        _check_outputs(rows.outputs, outputs_of(bundle))
        height = rows.frame.height
        if height == 0:
            none = np.empty(0, np.float32)
            return bundle.version, _wanted(rows, dict.fromkeys(outputs_of(bundle), none))
        seconds = [given for given in (rows.seconds, remaining) if given is not None]
        deadline = time.monotonic() + (min(seconds) if seconds else self.dispatcher.limits.deadline_seconds)
        group = tuple(rows.frame.schema.items())
        answered_by, scores = await self.batcher.answer(rows.frame, group, height, deadline)
        self._check_version(version, answered_by)
        return answered_by, _wanted(rows, scores)

    def _bundle(self, name: str, version: str) -> Bundle:
        self.dispatcher.check_offered("infer", INFER_ROLES)
        bundle = self.dispatcher.service.bundle
        names = self._names(bundle)
        if name not in names:
            raise NotFound(f'There is no model "{name[:60]}". Models here: {", ".join(names) or "none"}.')
        self._check_version(version, bundle.version)
        return bundle

    def _names(self, bundle: Bundle) -> list[str]:
        """The names of the ranking model."""
        names = [MODEL, *([self.model_name] if self.model_name else [])]
        return names if MODEL in bundle.models else []

    def _check_version(self, version: str, serving: str) -> None:
        if version and version != serving:
            raise NotFound(f'Version "{version[:60]}" of {MODEL} is not served now; {serving} is.')

    def _score_all(self, frames: Sequence[pl.DataFrame]) -> list[tuple[str, Outputs]]:
        together = pl.concat(frames) if len(frames) > 1 else frames[0]
        recommender = self.dispatcher.service.current
        ends = np.cumsum([frame.height for frame in frames])[:-1]
        parts = np.split(recommender.score(together), ends)
        tasks = recommender.tasks
        return [
            (recommender.version, {OUTPUT: part})
            if not tasks.tasks
            else (recommender.version, {SCORE: tasks.scores(part), **tasks.by_task(part)})
            for part in parts
        ]


def outputs_of(bundle: Bundle) -> list[str]:
    """The names of the ranking model's outputs."""
    tasks = bundle.models[MODEL].get("labels")
    return [SCORE, *tasks] if tasks else [OUTPUT]


def _wanted(rows: ScoringRows, outputs: Outputs) -> Outputs:
    return {name: outputs[name] for name in rows.outputs or outputs}


def inputs_of(bundle: Bundle) -> list[TensorFacts]:
    """The raw columns that the ranking model's features read; list columns are followed by their lengths."""
    kinds = kinds_of_columns(bundle.recipe)
    in_hex = {column.name for column in bundle.recipe.log.columns if column.type == "hex"}  # as in the log
    model = bundle.models[MODEL]
    used = {*model["numbers"], *model["keys"], *model["wide"], *model.get("sequences", ())}
    read = dict.fromkeys(
        name for feature in bundle.recipe.features if feature.name in used for name in feature.columns
    )
    facts = []
    for name in read:
        datatype = "BYTES" if name in in_hex else _DATATYPE_OF_KIND[element_of(kinds[name])]
        facts.append(
            TensorFacts(name=name, datatype=datatype, shape=[-1, -1] if is_list(kinds[name]) else [-1])
        )
        if is_list(kinds[name]):
            facts.append(TensorFacts(name=name + LENGTHS, datatype="INT64", shape=[-1]))
    return facts


# over HTTP

_request_decoder = msgspec.json.Decoder(Inference)


def rows_from_http(body: bytes, header_length: str | None, limits: Limits) -> ScoringRows:
    """Parse a JSON request; if a header gives the length of the JSON, the bytes of tensors follow it."""
    text, rest = _split(body, header_length)
    limits.check_json(text)
    request = decode_json(_request_decoder, text)
    columns, offset = [], 0
    for tensor in request.inputs:
        shape = Shape.of(tensor.name, tensor.shape)
        num_bytes = tensor.parameters.get("binary_data_size")
        if num_bytes is None:
            values = column_from_values(tensor.name, tensor.datatype, shape.num_values, tensor.data or [])
            columns.append(shape.column(values))
            continue
        if not isinstance(num_bytes, int) or not 0 <= num_bytes <= len(rest) - offset:
            raise BadRequest(f'Input "{tensor.name}": binary_data_size is more than the request has.')
        data = rest[offset : offset + num_bytes]
        values = column_from_bytes(tensor.name, tensor.datatype, shape.num_values, data)
        columns.append(shape.column(values))
        offset += num_bytes
    if offset != len(rest):
        raise BadRequest(f"There are {len(rest) - offset:,} bytes more than the inputs declare.")
    in_bytes = [output.parameters.get("binary_data", False) for output in request.outputs]
    wants_bytes = any(in_bytes) or (not in_bytes and request.parameters.get("binary_data_output") is True)
    return ScoringRows(
        frame_of(columns),
        request.id or "",
        _seconds(request.parameters.get("timeout")),
        wants_bytes,
        tuple(output.name for output in request.outputs),
    )


def _split(body: bytes, header_length: str | None) -> tuple[bytes, bytes]:
    if header_length is None:
        return body, b""
    if not header_length.isascii() or not header_length.isdigit() or int(header_length[:12]) > len(body):
        raise BadRequest("Inference-Header-Content-Length must be the number of bytes of the JSON.")
    return body[: int(header_length)], body[int(header_length) :]


def _check_outputs(names: Iterable[str], known: Sequence[str]) -> None:
    for name in names:
        if name not in known:
            expected = ", ".join(f'"{one}"' for one in known)
            raise BadRequest(f'There is no output "{name[:60]}"; expected {expected}.')


def _seconds(timeout: Any) -> float | None:
    """The protocol's `timeout` is in microseconds; 0 means none."""
    return min(timeout, 1_000 * MAX_DEADLINE_MS) / 1e6 if isinstance(timeout, int) and timeout > 0 else None


def http_answer(version: str, rows: ScoringRows, outputs: Outputs) -> tuple[bytes, dict[str, str]]:
    """Body and headers of the HTTP answer."""
    tensors, data = [], b""
    for name, scores in outputs.items():
        tensor = Tensor(name=name, shape=[len(scores)], datatype="FP32")
        if rows.in_bytes:
            own = scores.astype("<f4").tobytes()
            tensor.parameters = {"binary_data_size": len(own)}
            data += own
        else:
            tensor.data = scores.tolist()
        tensors.append(tensor)
    answer = InferenceResult(model_name=MODEL, model_version=version, outputs=tensors, id=rows.id or None)
    text = msgspec.json.encode(answer)
    if not rows.in_bytes:
        return text, {"content-type": "application/json"}
    headers = {"content-type": "application/octet-stream", "inference-header-content-length": str(len(text))}
    return text + data, headers


# over gRPC


def rows_from_grpc(data: bytes) -> tuple[str, str, ScoringRows]:
    """Name and version of the model, and the rows."""
    request = convert.parse(pb.ModelInferRequest, data)
    raw = request.raw_input_contents
    if raw and len(raw) != len(request.inputs):
        raise BadRequest(f"There are {len(request.inputs)} inputs, but {len(raw)} raw_input_contents.")
    columns = []
    for number, tensor in enumerate(request.inputs):
        shape = Shape.of(tensor.name, tensor.shape)
        if raw:
            column = column_from_bytes(tensor.name, tensor.datatype, shape.num_values, raw[number])
        elif tensor.datatype in _CONTENTS:
            values = list(getattr(tensor.contents, _CONTENTS[tensor.datatype]))
            column = column_from_values(tensor.name, tensor.datatype, shape.num_values, values)
        else:
            raise BadRequest(f'Input "{tensor.name}" has the unknown datatype "{tensor.datatype[:20]}".')
        columns.append(shape.column(column))
    timeout = request.parameters["timeout"].int64_param if "timeout" in request.parameters else None
    return (
        request.model_name,
        request.model_version,
        ScoringRows(
            frame_of(columns),
            request.id,
            _seconds(timeout),
            outputs=tuple(output.name for output in request.outputs),
        ),
    )


def grpc_answer(version: str, rows: ScoringRows, outputs: Outputs) -> pb.ModelInferResponse:
    make = pb.ModelInferResponse.InferOutputTensor
    return pb.ModelInferResponse(
        model_name=MODEL,
        model_version=version,
        id=rows.id,
        outputs=[make(name=name, datatype="FP32", shape=[len(scores)]) for name, scores in outputs.items()],
        raw_output_contents=[scores.astype("<f4").tobytes() for scores in outputs.values()],
    )


def grpc_model(model: ModelFacts) -> pb.ModelMetadataResponse:
    facts = pb.ModelMetadataResponse.TensorMetadata
    return pb.ModelMetadataResponse(
        name=model.name,
        versions=model.versions,
        platform=model.platform,
        inputs=[facts(name=one.name, datatype=one.datatype, shape=one.shape) for one in model.inputs],
        outputs=[facts(name=one.name, datatype=one.datatype, shape=one.shape) for one in model.outputs],
    )
