"""ONNX graphs as functions of arrays."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from recmill.dataset.batch import Array
from recmill.errors import ArtifactError, MissingPackage


class Graph:
    """A graph of a bundle. Thread-safe: a run uses only the calling thread.

    Memory does not grow with the number of runs or of different input sizes.
    """

    def __init__(self, source: Path | bytes) -> None:
        self._session = _open(source)
        self.inputs = tuple(node.name for node in self._session.get_inputs())
        (self.output,) = (node.name for node in self._session.get_outputs())

    def run(self, **inputs: Array) -> Array:
        """The output for these inputs, float32 arrays; inputs that the graph lacks are ignored."""
        output: Array = self._session.run([self.output], {name: inputs[name] for name in self.inputs})[0]
        return output


def _open(source: Path | bytes) -> Any:
    try:
        import onnxruntime
    except ImportError:
        raise MissingPackage("Serving", "onnxruntime", "serve") from None
    where = "Graph" if isinstance(source, bytes) else f"Graph {source}"
    try:
        content = source if isinstance(source, bytes) else source.read_bytes()
        options = _options(onnxruntime)
        return onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
    except FileNotFoundError:
        raise ArtifactError(f"{where} does not exist. Run `recmill export` again.") from None
    except Exception as error:  # onnxruntime has an exception type for each status, without a common base
        reason = str(error).split("\n")[0]
        raise ArtifactError(f"{where} cannot be loaded: {reason}. Run `recmill export` again.") from error


def _options(onnxruntime: Any) -> Any:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.inter_op_num_threads = 1
    options.execution_mode = onnxruntime.ExecutionMode.ORT_SEQUENTIAL
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    # A memory pattern would be kept for each input size. The arena stays: all threads share it, while malloc holds
    # memory for each of them (16 threads at once: 245 MB with it, 1 GB without).
    options.enable_mem_pattern = False
    options.enable_cpu_mem_arena = True
    options.log_severity_level = 3
    return options
