"""Optional packages: which extra of recmill installs each."""

from __future__ import annotations

import importlib.util

from recmill.errors import MissingPackage

# imported as -> distribution, extra. An extra that includes others is named only for what it adds.
OPTIONAL = {
    "torch": ("torch", "train"),
    "safetensors": ("safetensors", "train"),
    "tensorboard": ("tensorboard", "tensorboard"),
    "mlflow": ("mlflow-skinny", "mlflow"),
    "onnx": ("onnx", "export"),
    "onnxscript": ("onnxscript", "export"),
    "onnxruntime": ("onnxruntime", "serve"),
    "faiss": ("faiss-cpu", "serve"),
    "starlette": ("starlette", "serve"),
    "uvicorn": ("uvicorn", "serve"),
    "httptools": ("httptools", "serve"),
    "uvloop": ("uvloop", "serve"),
    "grpc": ("grpcio", "serve"),
    "grpc_health": ("grpcio-health-checking", "serve"),
    "grpc_reflection": ("grpcio-reflection", "serve"),
    "google": ("protobuf", "serve"),
    "prometheus_client": ("prometheus-client", "serve"),
    "redis": ("redis", "redis"),
    "hiredis": ("hiredis", "redis"),
    "opentelemetry": ("opentelemetry-sdk", "otel"),
    "ray": ("ray", "ray"),
    "pyspark": ("pyspark", "spark"),
    "pandas": ("pandas", "ray"),
    "optuna": ("optuna", "tune"),
    "yaml": ("pyyaml", "deploy"),
}


def missing_package(error: ModuleNotFoundError, what: str) -> MissingPackage | None:
    """The line that installs what an import did not find, if it is one of our optional packages."""
    distribution, extra = OPTIONAL.get((error.name or "").partition(".")[0], (None, None))
    return MissingPackage(what, distribution, extra) if distribution and extra else None


def check_installed(what: str, *modules: str) -> None:
    """Fail before any work if a package is missing that a process of its own would be the first to import."""
    for module in modules:
        if importlib.util.find_spec(module) is None:
            raise MissingPackage(what, *OPTIONAL[module])
