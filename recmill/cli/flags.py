"""Flags from the fields of config dataclasses, and configs from parsed flags."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeVar

from recmill.config import MODULES, FlagField, ValueKind, flag_fields
from recmill.errors import RecmillError

C = TypeVar("C")


class UsageError(RecmillError):
    """Flags that do not go together."""

    exit_code = 2


def add_flags(
    parser: Any, config: type, leave_out: Collection[str] = (), rename: Mapping[str, str] | None = None
) -> None:
    """Add a flag for each field of a config that has one. Absent flags leave the config's defaults."""
    groups: dict[str, Any] = {}
    for field in flag_fields(config):
        if field.name in leave_out:
            continue
        title = field.flag.group
        if title is not None and title not in groups:
            groups[title] = parser.add_argument_group(title)
        (groups[title] if title is not None else parser).add_argument(
            *([rename[field.name]] if rename and field.name in rename else field.options),
            dest=_dest(config, field.name),
            default=argparse.SUPPRESS,
            help=field.help.replace("%", "%%"),
            **_form(field),
        )


def add_trust_code(parser: Any) -> None:
    parser.add_argument(
        "--trust-code",
        type=typed(MODULES),
        default=(),
        metavar=MODULES.metavar,
        help="modules or packages of functions that the bundle's features may call (default: none)",
    )


def read_config(parsed: argparse.Namespace, config: type[C], **more: Any) -> C:
    """The config of the given flags; `more` are fields that do not come from flags."""
    return config(**_given(parsed, config), **more)


def is_given(parsed: argparse.Namespace, config: type, name: str) -> bool:
    return hasattr(parsed, _dest(config, name))


def refuse_flags(
    parsed: argparse.Namespace, config: type, reason: str, only: Collection[str] | None = None
) -> None:
    """Raise UsageError for the first flag of a config, or of these fields of it, that was given."""
    for field in flag_fields(config):
        if is_given(parsed, config, field.name) and (only is None or field.name in only):
            raise UsageError(f"{field.option} {reason}")


def typed(kind: ValueKind) -> Callable[[str], Any]:
    """A kind of value as an argparse type, whose message is shown unchanged."""

    def parse(text: str) -> Any:
        try:
            return kind.parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return parse


def _given(parsed: argparse.Namespace, config: type) -> dict[str, Any]:
    return {
        field.name: _collected(field, getattr(parsed, _dest(config, field.name)))
        for field in flag_fields(config)
        if is_given(parsed, config, field.name)
    }


def _dest(config: type, name: str) -> str:
    """The argparse dest of a field. Two configs of one command may have fields of the same name."""
    return f"{config.__name__}.{name}"


def _collected(field: FlagField, value: Any) -> Any:
    """The values of a repeated flag, as the field's type."""
    if not field.is_repeated:
        return value
    return dict(value) if isinstance(field.default, Mapping) else tuple(value)


def _form(field: FlagField) -> dict[str, Any]:
    if field.type is bool:
        return {"action": argparse.BooleanOptionalAction if field.default else "store_true"}
    action = {"action": "append"} if field.is_repeated else {}
    if field.choices is not None:
        return {"choices": field.choices, **action}
    # argparse would show `dest`, which includes the config's name.
    metavar = field.flag.metavar or field.kind.metavar or field.name.upper()
    return {"type": typed(field.kind), "metavar": metavar, **action}
