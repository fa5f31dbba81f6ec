"""What a server showed, joined with what its users went on to click: the request log against the log of events."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import polars as pl

from recmill.artifacts.checkpoint.checkpoint import Checkpoint
from recmill.errors import ArtifactError, FeatureError, LogError
from recmill.logs.base import open_source
from recmill.logs.scan import scan
from recmill.logs.tally import Tally
from recmill.metrics import exact_auc


@dataclass(frozen=True)
class RequestMetrics:
    """One version, or one channel of it, in numbers. A find is a request with a click among the items it showed."""

    version: str
    channel: str | None
    requests: int
    items: int
    clicks: int
    find_rate: float
    click_rate: float
    auc: float | None  # of the served scores; None when all or none of the items were clicked


def evaluate_requests(
    folder: Checkpoint, requests: Path, data: str, window_seconds: float
) -> list[RequestMetrics]:
    """Versions, each followed by its channels. An item counts as clicked when its user clicked it within the window."""
    shown = _read_requests(requests)
    clicks = _read_clicks(folder, data, shown["user"])
    joined = _with_clicks(shown, clicks, window_seconds)
    found = []
    for (version,), rows in joined.group_by("version", maintain_order=True):
        found.append(_numbers(str(version), None, rows))
        for (channel,), part in rows.group_by("channels", maintain_order=True):
            found.append(_numbers(str(version), str(channel), part))
    return found


def _read_requests(folder: Path) -> pl.DataFrame:
    """One row for each item that was shown: request, user, time in seconds, item, score, channel, version."""
    files = sorted(folder.glob("*.parquet"))
    if not files:
        raise ArtifactError(f"{folder} holds no request log. Serve with --request-log {folder} first.")
    try:
        requests = pl.read_parquet(files)
    except (OSError, pl.exceptions.PolarsError) as error:
        raise ArtifactError(f"The request log in {folder} cannot be read: {error}") from None
    shown = requests.with_row_index("request_number").select(
        "request_number",
        "user",
        (pl.col("time").dt.timestamp("us") / 1e6).alias("time"),
        "version",
        "items",
        "scores",
        "channels",
    )
    return shown.explode("items", "scores", "channels").drop_nulls(["user", "items"])


def _read_clicks(folder: Checkpoint, data: str, users: pl.Series) -> pl.DataFrame:
    """User, item and time of clicks by these users."""
    recipe, plan = folder.recipe, folder.plan
    log, label = recipe.log, recipe.click_label
    if log.user is None or log.item is None or log.time is None or label is None:
        raise FeatureError(
            f'Recipe "{recipe.name}" must name log.user, log.item and log.time, and have a model: requests and clicks '
            "are joined by them."
        )
    source, known = open_source(log, data, may_grow=True), users.unique().implode()
    columns = [
        pl.col(log.user).cast(pl.String).alias("user"),
        pl.col(log.item).cast(pl.String).alias("items"),
        pl.col(log.time).cast(pl.Float64).alias("clicked_at"),
    ]
    parts = []
    for frame in scan(source, source.units(), Tally()):
        rows = frame.filter(pl.col(log.user).cast(pl.String).is_in(known))
        if rows.height:
            parts.append(plan.keep_positive(label, rows).select(columns))
    if not parts:
        raise LogError(f"The log in {data} has no rows of the users that were asked for.")
    return pl.concat(parts)


def _with_clicks(shown: pl.DataFrame, clicks: pl.DataFrame, window_seconds: float) -> pl.DataFrame:
    pairs = shown.join(clicks, on=["user", "items"], how="inner").filter(
        pl.col("clicked_at").is_between(pl.col("time"), pl.col("time") + window_seconds)
    )
    clicked = pairs.select("request_number", "items", pl.lit(True).alias("clicked")).unique(
        ["request_number", "items"]
    )
    joined = shown.join(clicked, on=["request_number", "items"], how="left", maintain_order="left")
    return joined.with_columns(pl.col("clicked").fill_null(False)).sort(
        "version", "channels", maintain_order=True
    )


def _numbers(version: str, channel: str | None, rows: pl.DataFrame) -> RequestMetrics:
    by_request = rows.group_by("request_number").agg(pl.col("clicked").any())
    clicks = int(rows["clicked"].sum())
    auc = None
    if 0 < clicks < rows.height:
        auc = exact_auc(rows["clicked"].cast(pl.Float32).to_numpy(), rows["scores"].to_numpy())
    return RequestMetrics(
        version,
        channel,
        by_request.height,
        rows.height,
        clicks,
        float(by_request["clicked"].mean() or 0.0),  # type: ignore[arg-type]
        clicks / rows.height,
        auc,
    )
