"""Titles of items: the text column of items whose name suggests it."""

from __future__ import annotations

from collections.abc import Iterable

from recmill.recipe.kinds import kinds_of_columns, owners_of_columns
from recmill.recipe.names import plain_name
from recmill.recipe.recipe import Recipe

_ENDS = ("title", "name", "headline")
_IMAGE_ENDS = ("image", "img", "poster", "cover", "thumbnail", "thumb", "picture", "photo")


def is_title(name: str) -> bool:
    """Whether a column's name suggests titles: title, Book-Title, product_name."""
    return plain_name(name).endswith(_ENDS)


def title_column(recipe: Recipe) -> str | None:
    """The column of an item's title, if the log or a side table has one."""
    kinds, owners = kinds_of_columns(recipe), owners_of_columns(recipe)
    texts = [name for name, owner in owners.items() if owner == "item" and kinds.get(name) == "text"]
    return _best(name for name in texts if is_title(name) and name != recipe.log.item)


def image_column(recipe: Recipe) -> str | None:
    """The column of an item's image, by its name: image, poster, cover_url."""
    owners = owners_of_columns(recipe)
    names = [name for name, owner in owners.items() if owner == "item" and name != recipe.log.item]
    return _best(name for name in names if is_image(name))


def is_image(name: str) -> bool:
    plain = plain_name(name)
    return plain.removesuffix("url").removesuffix("link").endswith(_IMAGE_ENDS)


def _best(names: Iterable[str]) -> str | None:
    """`title` before `brand_name`: the shortest name is the least specific."""
    return min(names, key=len, default=None)
