"""Parameters of recall: half-lives, variants of item-item models, weights of channels. Fitted, or defaults."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from recmill.recall.fusion import Fusion

# The name of the ranker's order of the candidates, which takes part in the fusion like a channel.
RANKING = "ranking"


@dataclass(frozen=True)
class NeighbourParameters:
    """The variant of an item-item model, and the number of profile items after which a weight is halved."""

    variant: str
    half_life: float | None


@dataclass(frozen=True)
class RecallParameters:
    """All parameters of recall that are chosen on eval."""

    popular_half_life: float | None = None  # in interactions
    neighbours: Mapping[str, NeighbourParameters] = field(default_factory=dict)
    fusion: Fusion = field(default_factory=lambda: Fusion({"popular": 1.0}))
    new_users: Fusion = field(default_factory=lambda: Fusion({"popular": 1.0}))  # for users without clicks
    is_fitted: bool = False

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> RecallParameters:
        neighbours = {
            name: NeighbourParameters(one["variant"], one["half_life"])
            for name, one in content["neighbours"].items()
        }
        fusion, new_users = (
            Fusion(dict(content[name]["weights"]), content[name]["offset"])
            for name in ("fusion", "new_users")
        )
        return cls(content["popular_half_life"], neighbours, fusion, new_users, content["is_fitted"])


# Defaults: mostly the towers, some co-interactions, a little popularity.
UNFITTED = RecallParameters(
    neighbours={"co_clicks": NeighbourParameters("cosine", 6.0)},
    fusion=Fusion({"two_tower": 0.7, "similar": 0.1, "co_clicks": 0.1, "popular": 0.1}),
    new_users=Fusion({"two_tower": 0.7, "popular": 0.3}),
)
