"""Parses times to seconds since 1970: ISO text, numbers since 1970, or the recipe's format."""

from __future__ import annotations

import polars as pl

NOT_A_TIME = "not a time"
# Seconds, milliseconds, microseconds and nanoseconds since 1970 do not overlap for times between 1973 and 5138.
_LARGEST_SECONDS = 1e11
_ISO = (
    r"^\s*(?<year>\d{4})[-/.](?<month>\d{1,2})[-/.](?<day>\d{1,2})"
    r"(?:[T ](?<hour>\d{1,2}):(?<minute>\d{2})(?::(?<second>\d{2})(?<fraction>[.,]\d+)?)?)?"
    r"\s*(?<zone>Z|z|UTC|[+-]\d{2}(?::?\d{2})?)?\s*$"
)


def parse_times(texts: pl.Series, format: str = "") -> tuple[pl.Series, pl.Series]:
    """Texts as seconds since 1970, and a mask of invalid ones. Times without a zone count as UTC.

    `format` is that of strptime; without it, texts are ISO dates and times, or numbers since 1970.
    """
    column = texts.set(texts == "", None).alias("text")
    values = column.to_frame().select((_formatted(format) if format else _iso_or_number()).alias("time"))
    times = values.to_series()
    return times, times.is_null() & column.is_not_null()


def seconds_of_numbers(numbers: pl.Series) -> pl.Series:
    """Seconds since 1970 of numbers whose size tells the unit: s, ms, us or ns."""
    return numbers.cast(pl.Float64).to_frame("number").select(_seconds(pl.col("number"))).to_series()


def _seconds(number: pl.Expr) -> pl.Expr:
    size = number.abs()
    return (
        pl.when(size < _LARGEST_SECONDS)
        .then(number)
        .when(size < _LARGEST_SECONDS * 1e3)
        .then(number / 1e3)
        .when(size < _LARGEST_SECONDS * 1e6)
        .then(number / 1e6)
        .otherwise(number / 1e9)
    )


def _iso_or_number() -> pl.Expr:
    number = pl.col("text").str.strip_chars().cast(pl.Float64, strict=False)
    finite = pl.when(number.is_finite()).then(number)
    return pl.coalesce(_seconds(finite), _iso())


def _iso() -> pl.Expr:
    parts = pl.col("text").str.extract_groups(_ISO)

    def whole(name: str) -> pl.Expr:
        return parts.struct.field(name).cast(pl.Int32, strict=False)

    day = pl.concat_str(
        parts.struct.field("year"), parts.struct.field("month"), parts.struct.field("day"), separator="-"
    ).str.to_date("%Y-%m-%d", strict=False)
    hour, minute, second = (whole(name).fill_null(0) for name in ("hour", "minute", "second"))
    is_clock = (hour < 24) & (minute < 60) & (second <= 60)
    fraction = (
        parts.struct.field("fraction").str.replace(",", ".", literal=True).cast(pl.Float64, strict=False)
    )
    zone = parts.struct.field("zone")
    minutes = zone.str.slice(1, 2).cast(pl.Float64, strict=False) * 60 + zone.str.slice(3).str.strip_chars(
        ":"
    ).cast(pl.Float64, strict=False).fill_null(0)
    shift = pl.when(zone.str.starts_with("-")).then(-minutes).otherwise(minutes).fill_null(0)
    clock = hour.cast(pl.Float64) * 3600 + minute * 60 + second + fraction.fill_null(0) - shift * 60
    return pl.when(is_clock).then(day.dt.epoch("d").cast(pl.Float64) * 86_400 + clock)


def _formatted(format: str) -> pl.Expr:
    text = pl.col("text").str.strip_chars()
    has_clock = any(part in format for part in ("%H", "%I", "%T", "%R", "%c", "%s"))
    if "%z" in format:
        found = text.str.to_datetime(format, time_unit="us", time_zone="UTC", strict=False)
    elif has_clock:
        found = text.str.to_datetime(format, time_unit="us", strict=False)
    else:
        found = text.str.to_date(format, strict=False).cast(pl.Datetime("us"))
    return found.dt.epoch("us").cast(pl.Float64) / 1e6
