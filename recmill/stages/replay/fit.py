"""Fit recall on eval: half-lives and variants of each channel alone, then the weights of all channels."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from recmill.metrics import RankingSums
from recmill.recall.fusion import Fusion, FusionFit, RankedLists, fit_fusion, quality
from recmill.recall.interactions import Array, Interactions
from recmill.recall.neighbours import PLAIN_EASE, PROFILE_HALF_LIVES
from recmill.recall.parameters import RANKING, UNFITTED, NeighbourParameters, RecallParameters
from recmill.recall.popularity import HALF_LIVES, popularity
from recmill.stages.replay.baselines import Neighbours, has_clicks, popular_lists, seen_of
from recmill.stages.replay.queries import HeldOutQueries, offsets_of
from recmill.stages.serve import messages as m
from recmill.stages.serve.recommender import Recommender

K = 10
_LIST_LENGTH = 100  # list length of each channel when weights are fitted
_FEWEST_QUERIES = 30  # minimal number of eval users for weights
_MAX_QUERIES = 1_000  # eval users by whom each channel's own parameters are chosen
_MAX_FUSED = 3_000  # eval users for weights: more, because there are more weights to choose from
_LEAST_WEIGHT = 1e-3  # weight of a channel that only adds candidates


@dataclass(frozen=True)
class ChannelFit:
    """The best parameters of each channel alone, without weights."""

    parameters: RecallParameters
    # The best plain one with equal weights for all items of a profile: the baseline of that name.
    ease_variant: str


def fit_channels(interactions: Interactions, queries: HeldOutQueries, neighbours: Neighbours) -> ChannelFit:
    """Half-lives and variants by the quality of the channel's own list, for users who clicked before."""
    known = queries.take(np.flatnonzero(has_clicks(interactions, queries))).sample(_MAX_QUERIES)
    seen = seen_of(interactions, known)
    # Half-lives as numbers of interactions stay valid when the log has grown.
    half_lives = [None if part is None else part * len(interactions) for part in HALF_LIVES]
    popular = {
        half_life: _quality(popular_lists(popularity(interactions, half_life), seen, K), known)
        for half_life in half_lives
    }
    quality = {
        (channel, variant, half_life): _quality(
            model.lists(seen, half_life, seen, K)[0].astype(np.int64), known
        )
        for (channel, variant), model in neighbours.items()
        for half_life in PROFILE_HALF_LIVES
    }
    best = {
        channel: max((key for key in quality if key[0] == channel), key=lambda key: quality[key])
        for channel in dict.fromkeys(channel for channel, _ in neighbours)
    }
    plain = [key for key in quality if key[0] == "ease" and key[1] in PLAIN_EASE and key[2] is None]
    return ChannelFit(
        RecallParameters(
            max(popular, key=lambda half_life: popular[half_life]),
            {channel: NeighbourParameters(key[1], key[2]) for channel, key in best.items()},
        ),
        max(plain, key=lambda key: quality[key])[1] if plain else "",
    )


def _quality(lists: Array, queries: HeldOutQueries) -> float:
    sums = RankingSums((K,))
    relevant = np.concatenate([np.empty(0, np.int64), *queries.relevant])
    sums.add(lists, offsets_of(queries.relevant), relevant)
    means = sums.means()
    return quality(means.get(f"ndcg@{K}", 0.0), means.get(f"recall@{K}", 0.0))


@dataclass(frozen=True)
class RecallFit:
    """Parameters with weights, and the eval quality that they were chosen by."""

    parameters: RecallParameters
    known_users: FusionFit | None
    new_users: FusionFit | None


def fit_weights(
    channels: RecallParameters, recommender: Recommender, interactions: Interactions, queries: HeldOutQueries
) -> RecallFit:
    """Weights by the lists that the server's own channels give, the ranker's order of their union among them."""
    # As the server tells them apart: a user of a side table who clicked nothing is as new as any other.
    is_new = ~has_clicks(interactions, queries)
    known = _fit_fusion(recommender, queries.take(np.flatnonzero(~is_new)))
    new = _fit_fusion(recommender, queries.take(np.flatnonzero(is_new)))
    if known is None:
        # Too few users to tell which channels help, or whether the ranker does: defaults, with the fitted half-lives.
        fusion, cold = UNFITTED.fusion, UNFITTED.new_users
    else:
        fusion, cold = known.fusion, new.fusion if new is not None else Fusion({"popular": 1.0})
    used = {name: one for name, one in channels.neighbours.items() if fusion.weights.get(name)}
    fitted = RecallParameters(channels.popular_half_life, used, fusion, cold, is_fitted=known is not None)
    return RecallFit(fitted, known, new)


def _fit_fusion(recommender: Recommender, queries: HeldOutQueries) -> FusionFit | None:
    queries = queries.sample(_MAX_FUSED)
    if len(queries) < _FEWEST_QUERIES:
        return None
    lists = [recommender.channel_lists(m.Recall(user=user, k=_LIST_LENGTH)) for user in queries.users]
    fitted = fit_fusion(RankedLists.of(lists), queries.relevant, K)
    if set(fitted.fusion.weights) == {RANKING}:
        # The ranker was measured on candidates of all channels, so every channel must contribute some.
        weights = {name: _LEAST_WEIGHT for name, alone in fitted.alone.items() if alone} | {RANKING: 1.0}
        return FusionFit(Fusion(weights, fitted.fusion.offset), fitted.quality, fitted.alone)
    return fitted
