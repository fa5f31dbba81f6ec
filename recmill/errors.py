"""Everything recmill raises on purpose.

RecmillError            message says where, what was found, what was expected, what to do next
├── RecipeError         the recipe is wrong; holds every problem found, not just the first
├── LogError            a log file is missing, unreadable, truncated or not what the recipe says
│   └── TooManyBadRows  more rows were set aside than --max-bad allows
├── ExpressionError     a condition or expression is not in our grammar, or does not fit its columns
├── FeatureError        a feature cannot be fitted or applied to this data
├── TrainingError       training cannot go on: a loss or gradient is not finite, a model gives a wrong shape
├── ArtifactError       an artifact is incomplete, damaged, of another kind or already there
│   └── DamagedWork     what a killed job left cannot be used: the job starts over
├── ResourceError       the disk is full, the memory bound is too small for the job
├── MissingPackage      an optional package is needed; the message is the install line
├── StoreError          a feature store or event stream does not answer, or not in time
├── StorageError        object storage does not answer, refuses, or holds something else than was written
└── ServingError        a request that is answered with a refusal
    ├── BadRequest      it is wrong in itself
    ├── NotFound        it names a version or model that is not there
    ├── Unauthenticated there is no token, or an unknown one
    ├── Forbidden       the token is not good for this
    ├── Overloaded      the queue is full: come back later
    └── TooLate         its deadline has passed
"""

from __future__ import annotations

import errno
import importlib.util
from collections.abc import Sequence


class RecmillError(Exception):
    """Base of all errors that the input or the machine causes, as opposed to bugs."""

    exit_code = 1


class RecipeError(RecmillError):
    """Every problem found in one recipe, each with its key path."""

    exit_code = 2

    def __init__(self, source: str, problems: Sequence[str]) -> None:
        self.source = source
        self.problems = tuple(problems)
        super().__init__("\n".join(f"{source}: {problem}" for problem in self.problems))

    def __reduce__(self) -> tuple[type[RecipeError], tuple[str, tuple[str, ...]]]:
        return type(self), (self.source, self.problems)


class LogError(RecmillError):
    """A log file is missing, unreadable, truncated or not as the recipe describes it."""


class TooManyBadRows(LogError):
    """More rows were set aside than --max-bad allows."""


class ExpressionError(RecmillError):
    """A condition or expression is outside our grammar or does not fit its columns; `at` is the offset from 0."""

    exit_code = 2

    def __init__(self, at: int, reason: str) -> None:
        self.at, self.reason = at, reason
        super().__init__(f"at character {at + 1}: {reason}")

    def __reduce__(self) -> tuple[type[ExpressionError], tuple[int, str]]:
        return type(self), (self.at, self.reason)


class FeatureError(RecmillError):
    """A feature cannot be fitted or applied to this data."""


class TrainingError(RecmillError):
    """Training cannot go on: a loss or gradient is not finite, or a model gives a wrong shape."""


class StopTraining(Exception):  # not an error: the caller raises it, and train returns
    """Raise it in a callback of `train` to end the model's run after this step, with a checkpoint."""


class ArtifactError(RecmillError):
    """An artifact is incomplete, damaged, of another kind or already there."""


class DamagedWork(ArtifactError):
    """The unfinished work of a killed job cannot be used; the job starts over."""


class ResourceError(RecmillError):
    """The disk is full, or the memory bound is too small for the job."""


class MissingPackage(RecmillError):
    """An optional package is needed; the message is the install line."""

    def __init__(self, what: str, package: str, extra: str) -> None:
        super().__init__(f'{what} needs {package}. Install it: pip install "recmill[{extra}]"')


class StoreError(RecmillError):
    """A feature store or event stream does not answer, or not in time."""


class StorageError(RecmillError):
    """Object storage does not answer, refuses, or holds something else than was written."""


class ServingError(RecmillError):
    """A request that is refused: the HTTP status and the name of the gRPC code."""

    http_status = 400
    grpc_code = "INVALID_ARGUMENT"


class BadRequest(ServingError):
    """The request itself is invalid."""


class NotFound(ServingError):
    """The request names an unknown version or model."""

    http_status, grpc_code = 404, "NOT_FOUND"


class Unauthenticated(ServingError):
    """The token is missing or unknown."""

    http_status, grpc_code = 401, "UNAUTHENTICATED"


class Forbidden(ServingError):
    """The token lacks the required scope."""

    http_status, grpc_code = 403, "PERMISSION_DENIED"


class Overloaded(ServingError):
    """The queue is full; retry later."""

    http_status, grpc_code = 429, "RESOURCE_EXHAUSTED"


class TooLate(ServingError):
    """The request's deadline has passed."""

    http_status, grpc_code = 504, "DEADLINE_EXCEEDED"


def first_line(error: BaseException) -> str:
    """The first non-empty line of another program's error."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0][:500] if lines else type(error).__name__


# How other programs report a lack of memory, or of room for a thread's stack.
_OUT_OF_MEMORY = (
    "bad_alloc",
    "allocate memory",
    "out of memory",
    "can't start new thread",
    "failed to map segment",
    "resource temporarily unavailable",
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation of memory or of a thread failed, in any library."""
    if isinstance(error, MemoryError) or getattr(error, "errno", None) == errno.ENOMEM:
        return True
    text = str(error).lower()
    return isinstance(error, (RuntimeError, OSError, ImportError)) and any(
        sign in text for sign in _OUT_OF_MEMORY
    )


# import name -> distribution, extra. An extra that includes others is named only for what it adds.
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
    "lightgbm": ("lightgbm", "trees"),
    "yaml": ("pyyaml", "deploy"),
}


def missing_package(error: ModuleNotFoundError, what: str) -> MissingPackage | None:
    """The install line for a failed import, if it is one of our optional packages."""
    distribution, extra = OPTIONAL.get((error.name or "").partition(".")[0], (None, None))
    return MissingPackage(what, distribution, extra) if distribution and extra else None


def check_installed(what: str, *modules: str, extra: str | None = None) -> None:
    """Fail early if a package is missing that is only needed later, or by another process.

    `extra` names an extra that includes all of them; by default it is the package's own.
    """
    for module in modules:
        if importlib.util.find_spec(module) is None:
            distribution, own_extra = OPTIONAL[module]
            raise MissingPackage(what, distribution, extra or own_extra)
