"""Everything recmill raises on purpose.

RecmillError            message says where, what was found, what was expected, what to do next
├── RecipeError         the recipe is wrong; holds every problem found, not just the first
├── LogError            a log file is missing, unreadable, truncated or not what the recipe says
│   └── TooManyBadRows  more rows were set aside than --max-bad allows
├── FeatureError        a feature cannot be fitted or applied to this data
├── TrainingError       training cannot go on: a loss or gradient is not finite, a model gives a wrong shape
├── ArtifactError       an artifact is incomplete, damaged, of another kind or already there
├── ResourceError       the disk is full, the memory bound is too small for the job
└── MissingPackage      an optional package is needed; the message is the install line
"""

from __future__ import annotations

from collections.abc import Sequence


class RecmillError(Exception):
    """Base of every error that is the input's or the machine's doing, not ours."""

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
    """A log file is missing, unreadable, truncated or not what the recipe says."""


class TooManyBadRows(LogError):
    """More rows were set aside than --max-bad allows."""


class FeatureError(RecmillError):
    """A feature cannot be fitted or applied to this data."""


class TrainingError(RecmillError):
    """Training cannot go on: a loss or gradient is not finite, or a model gives a wrong shape."""


class ArtifactError(RecmillError):
    """An artifact is incomplete, damaged, of another kind or already there."""


class ResourceError(RecmillError):
    """The disk is full, or the memory bound is too small for the job."""


class MissingPackage(RecmillError):
    """An optional package is needed; the message is the install line."""

    def __init__(self, what: str, package: str, extra: str) -> None:
        super().__init__(f'{what} needs {package}. Install it: pip install "recmill[{extra}]"')
