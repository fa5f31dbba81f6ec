"""Client side of the Open Inference Protocol: columns of text to tensors, responses to scores."""

from __future__ import annotations

import asyncio
import json
import math
from typing import Any, Protocol

import numpy as np
import polars as pl

from recmill.errors import RecmillError
from recmill.stages.bench.serve.config import TransportName
from recmill.stages.bench.serve.http1 import get, post
from recmill.stages.bench.serve.transports import GrpcTransport, HttpTransport, Transport, ask

Array = np.ndarray[Any, np.dtype[Any]]

MODEL = "ranking"
_SERVICE = "/inference.GRPCInferenceService"
_NUMPY = {"INT64": "<i8", "FP64": "<f8", "BOOL": "?"}


class Scorer(Protocol):
    """Scores rows over one transport. `inputs` are the model's raw columns with their datatypes."""

    async def inputs(self) -> dict[str, str]: ...
    def request(self, rows: pl.DataFrame, datatypes: dict[str, str]) -> bytes: ...
    def scores(self, body: bytes) -> Array: ...
    def transport(self) -> Transport: ...


class GrpcScorer:
    """The protocol as protobuf, values as raw bytes."""

    def __init__(self, server: str, deadline_seconds: float) -> None:
        self.server, self.deadline_seconds = server, deadline_seconds

    def transport(self, method: str = "ModelInfer") -> Transport:
        return GrpcTransport(self.server, f"{_SERVICE}/{method}", self.deadline_seconds, 1)

    async def inputs(self) -> dict[str, str]:
        from recmill.stages.serve.proto import predict_v2_pb2 as pb

        request = pb.ModelMetadataRequest(name=MODEL).SerializeToString()
        body = await _ask_once(self.transport("ModelMetadata"), request)
        return {one.name: one.datatype for one in pb.ModelMetadataResponse.FromString(body).inputs}

    def request(self, rows: pl.DataFrame, datatypes: dict[str, str]) -> bytes:
        from recmill.stages.serve.proto import predict_v2_pb2 as pb

        tensors, raw = [], []
        for column in rows:
            datatype = _wire_datatype(column, datatypes[column.name])
            tensor = pb.ModelInferRequest.InferInputTensor
            tensors.append(tensor(name=column.name, datatype=datatype, shape=[len(column)]))
            raw.append(_bytes(column, datatype))
        request = pb.ModelInferRequest(model_name=MODEL, inputs=tensors, raw_input_contents=raw)
        return bytes(request.SerializeToString())

    def scores(self, body: bytes) -> Array:
        from recmill.stages.serve.proto import predict_v2_pb2 as pb

        answer = pb.ModelInferResponse.FromString(body)
        if answer.raw_output_contents:
            return np.frombuffer(answer.raw_output_contents[0], "<f4")
        return np.array(answer.outputs[0].contents.fp32_contents, np.float32)


class HttpScorer:
    """The protocol as JSON."""

    def __init__(self, server: str, deadline_seconds: float) -> None:
        self.server, self.deadline_seconds = server, deadline_seconds

    def transport(self) -> Transport:
        return HttpTransport(self.server, self.deadline_seconds)

    async def inputs(self) -> dict[str, str]:
        body = await _ask_once(self.transport(), get(f"/v2/models/{MODEL}", self.server))
        return {one["name"]: one["datatype"] for one in json.loads(body)["inputs"]}

    def request(self, rows: pl.DataFrame, datatypes: dict[str, str]) -> bytes:
        inputs = [
            {
                "name": column.name,
                "datatype": datatypes[column.name],
                "shape": [len(column)],
                "data": column.to_list(),
            }
            for column in rows
        ]
        body = json.dumps({"inputs": inputs}).encode()
        return post(f"/v2/models/{MODEL}/infer", self.server, body)

    def scores(self, body: bytes) -> Array:
        return np.array(json.loads(body)["outputs"][0]["data"], np.float32)


def scorer_for(transport: TransportName, server: str, deadline_seconds: float) -> Scorer:
    return (
        GrpcScorer(server, deadline_seconds) if transport == "grpc" else HttpScorer(server, deadline_seconds)
    )


def parse_column(column: pl.Series, datatype: str) -> pl.Series:
    """Text parsed as a datatype of the protocol."""
    column = column.set(column == "", None)
    if datatype == "BYTES":
        return column
    if datatype == "BOOL":
        return column.str.to_lowercase().is_in(["1", "true"])
    number = column.cast(pl.Float64 if datatype.startswith("FP") else pl.Int64, strict=False)
    bad = column.filter(number.is_null() & column.is_not_null())
    if len(bad):
        raise RecmillError(f'Column "{column.name}" must hold numbers, but it holds "{bad[0]}".')
    return number


def _wire_datatype(column: pl.Series, datatype: str) -> str:
    """Integers and booleans with missing values go as floats, whose NaN can mean missing."""
    return "FP64" if datatype in ("INT64", "BOOL") and column.null_count() else datatype


def _bytes(column: pl.Series, datatype: str) -> bytes:
    if datatype == "BYTES":
        texts = [text.encode() for text in column.fill_null("")]
        return b"".join(len(text).to_bytes(4, "little") + text for text in texts)
    if datatype == "FP64":
        column = column.cast(pl.Float64).fill_null(math.nan)
    return column.to_numpy().astype(_NUMPY.get(datatype, "<f8")).tobytes()


def error_of(problem: str, body: bytes) -> str:
    try:
        return str(json.loads(body)["error"])
    except (ValueError, KeyError, TypeError):
        return f"{problem}."


async def _ask_once(transport: Transport, request: bytes) -> bytes:
    await transport.open()
    try:
        problem, body = await ask(transport, request)
    finally:
        transport.close()
        await asyncio.sleep(0)
    if problem:
        raise RecmillError(f"The server does not describe its model: {error_of(problem, body)}")
    return body
