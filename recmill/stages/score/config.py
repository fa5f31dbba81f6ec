"""The config of score."""

from dataclasses import dataclass
from typing import Annotated, Literal

from recmill.config import NAMES, Flag, ValueKind, parse_names
from recmill.engines.config import EngineConfig
from recmill.logs.config import LogConfig


def _parse_sides(text: str) -> tuple[str, ...]:
    names = parse_names(text)
    if not names or any(name not in ("user", "item") for name in names):
        raise ValueError(f"must be user, item or user,item, got {text}")
    return tuple(dict.fromkeys(names))


_SIDES = ValueKind(_parse_sides, "user,item")


@dataclass(frozen=True, kw_only=True)
class ScoreConfig(EngineConfig, LogConfig):
    """What to score and write, and where the work runs."""

    which: Annotated[str, Flag("which step of the checkpoint", metavar="best|last|STEP")] = "best"
    split: Annotated[
        Literal["test", "eval", "train"] | None,
        Flag("which rows of the Table to score (default: test, or eval without test rows)"),
    ] = None
    keep: Annotated[
        tuple[str, ...] | None,
        Flag(
            "raw columns to write beside scores (default: user and item, if the recipe names them)",
            NAMES,
            metavar="COLUMN,...",
        ),
    ] = None
    without_labels: Annotated[bool, Flag("the log lacks the columns that labels are made of")] = False
    scores: Annotated[bool, Flag("write scores (default when nothing else is asked for)")] = False
    embeddings: Annotated[
        tuple[Literal["user", "item"], ...], Flag("write vectors of users, items or both", _SIDES)
    ] = ()
    recall: Annotated[int | None, Flag("write the best K items for every user", metavar="K")] = None
    without_seen: Annotated[bool, Flag("with --recall: leave out what a user has clicked")] = False

    @property
    def wants_scores(self) -> bool:
        """Scores are written when they are asked for, or when nothing else is."""
        return self.scores or not (self.embeddings or self.recall)
