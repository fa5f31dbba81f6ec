"""Side files of items and users: the key that joins each to the log, and its attributes."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import polars as pl

from recmill.errors import LogError
from recmill.recipe.titles import is_title
from recmill.stages.init.columns import ColumnProfile, FileProfile
from recmill.stages.init.names import ITEM_FILES, USER_FILES

Role = Literal["user", "item"]
_CONTAINED = 0.9  # minimal fraction of the log's ids in the side file
_MAX_CATEGORIES = 20_000
_MAX_ATTRIBUTES = 8


@dataclass(frozen=True)
class SideFile:
    """A file with one row per user or item."""

    role: Role
    name: str  # name of the side table
    file: FileProfile
    key: ColumnProfile

    @property
    def others(self) -> list[ColumnProfile]:
        return [
            column for column in self.file.columns if column.name != self.key.name and len(column.present)
        ]

    @property
    def categories(self) -> list[ColumnProfile]:
        """Attributes that models read: values or list elements that recur in other rows."""
        title = self.title
        categories = [column for column in self.others if is_category(column, self.file.num_rows)]
        return [column for column in categories if title is None or column.name != title.name][
            :_MAX_ATTRIBUTES
        ]

    @property
    def title(self) -> ColumnProfile | None:
        """The name of an item: the column that is called so, or the first nearly unique text."""
        texts = [column for column in self.others if column.type == "text" and not column.list_separator]
        named = [column for column in texts if is_title(column.name)]
        unique = [c for c in texts if c.num_unique > 0.5 * len(c.present) and not _is_address(c)]
        return next(iter(named or unique), None)


def is_category(column: ColumnProfile, num_rows: int) -> bool:
    if column.type == "time" or column.num_unique < 2:
        return False
    if column.list_separator:
        return True
    if column.type == "float" or _is_address(column):
        return False
    return column.num_unique <= min(_MAX_CATEGORIES, max(20, num_rows // 4))


def _is_address(column: ColumnProfile) -> bool:
    return column.type == "text" and bool(column.present.head(20).str.contains("^https?://").any())


def role_by_name(path: str) -> Role:
    """The role that a file's name indicates: user, else item."""
    name = os.path.basename(path).lower()
    return "user" if any(word in name for word in USER_FILES) else "item"


def find_keys_by_values(events: FileProfile, sides: Sequence[FileProfile]) -> dict[Role, str]:
    """For a log without a header: the columns whose values are the keys of the side files."""
    keys: dict[Role, str] = {}
    for side in sides:
        role = role_by_name(side.path)
        overlaps = {}
        for column in events.columns:
            if column.type in ("int", "text") and column.name not in keys.values():
                contained, alike = _overlap(column, _first_key(side))
                if contained >= _CONTAINED:
                    overlaps[column.name] = alike
        if overlaps and role not in keys:
            keys[role] = max(overlaps, key=lambda name: overlaps[name])
    return keys


def _first_key(side: FileProfile) -> ColumnProfile:
    unique = [
        column
        for column in side.columns
        if column.num_unique == side.num_rows and column.type in ("int", "text")
    ]
    if not unique:
        raise LogError(
            f"{side.path}: no column tells its rows apart; a file of users or items has one row for each."
        )
    return unique[0]


def _overlap(column: ColumnProfile, key: ColumnProfile) -> tuple[float, float]:
    """The fraction of a column's values that a key covers, and the fraction of all values that both have."""
    left, right = (one.present.cast(pl.String).unique() for one in (column, key))
    both = int(left.is_in(right.implode()).sum())
    return both / max(1, len(left)), both / max(1, len(left) + len(right) - both)


def link(side: FileProfile, user: ColumnProfile, item: ColumnProfile, taken: set[str]) -> SideFile:
    """Join a file to the log, by a column of the same name or of the same values.

    The key is renamed to the log's name for it.
    """
    role, key = _key_of(side, user, item)
    if key.num_unique < side.num_rows:
        twice = key.values.filter(key.values.is_duplicated()).drop_nulls()
        example = f", such as {twice[0]!r}" if len(twice) else ""
        raise LogError(
            f'{side.path}: "{key.name}" has {side.num_rows - key.num_unique:,} rows without a value of their own'
            f"{example}; a file of {role}s has one row for each. Remove them."
        )
    name = (
        f"{role}s" if f"{role}s" not in taken else re.sub(r"\W+", "_", os.path.basename(side.path)).strip("_")
    )
    names = {key.name: (user if role == "user" else item).name}
    if not side.has_names:
        names |= {column.name: f"{role}_{column.name}" for column in side.columns if column.name != key.name}
        if role == "item" and (title := SideFile(role, name, side, key).title) is not None:
            names[title.name] = "title"
    side = side.renamed(names)
    key = next(column for column in side.columns if column.name == names[key.name])
    return SideFile(role, name, side, key)


def _is_about(path: str, role: Role, column: ColumnProfile, key: ColumnProfile) -> bool:
    """Whether `id` of artists.csv is the log's artistID: equal values alone could be those of anything."""
    name = os.path.basename(path).lower()
    nouns = USER_FILES if role == "user" else ITEM_FILES
    noun = key.plain.removesuffix("id")
    return column.plain == "id" and (any(word in name for word in nouns) or (len(noun) > 2 and noun in name))


def _key_of(side: FileProfile, user: ColumnProfile, item: ColumnProfile) -> tuple[Role, ColumnProfile]:
    roles: tuple[tuple[Role, ColumnProfile], ...] = (("user", user), ("item", item))
    named = [(role, found) for role, key in roles if (found := side.named(key.name)) is not None]
    if len(named) == 1:
        return named[0]
    if len(named) > 1:
        raise LogError(
            f"{side.path}: has both {user.name} and {item.name}; is it a second log? Give one file of events."
        )
    unique = [
        column
        for column in side.columns
        if column.num_unique == side.num_rows and column.type in ("int", "text")
    ]
    matches = [
        (role, column) for role, key in roles for column in unique if _overlap(key, column)[0] >= _CONTAINED
    ]
    by_name = [match for match in matches if match[0] == role_by_name(side.path)]
    for candidates in (matches, by_name):
        if len(candidates) == 1:
            role, column = candidates[0]
            if side.has_names and not _is_about(side.path, role, column, user if role == "user" else item):
                expected = user.name if role == "user" else item.name
                raise LogError(
                    f'{side.path}: "{column.name}" seems to be the {role}, which the log calls "{expected}". Rename it '
                    "in one of the files: columns are joined by name."
                )
            return candidates[0]
    raise LogError(
        f'{side.path}: shares no column with the log; expected one called "{user.name}" or "{item.name}". '
        "Rename it, or leave the file out."
    )
