"""How large a request may be, and how long it may take."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import msgspec

from recmill.errors import BadRequest
from recmill.stages.serve.config import MAX_CANDIDATES, MAX_K, LimitConfig

MAX_IDS = 10_000  # values in one list of a request
MAX_TEXT = 1_000  # characters of one text in a request
MAX_CHANNELS = 100
MAX_FIELDS = 100
MAX_BOOSTS = 16
SMALLEST_BOOST, LARGEST_BOOST = 0.01, 100.0
MAX_JSON_VALUES = 500_000  # values in one body: the interpreter does nothing else while it parses JSON
MAX_DEADLINE_MS = 600_000.0
IDS = {
    ("Event", "user"),
    ("Event", "item"),
    ("NewItem", "id"),
    ("Similar", "item"),
}  # lists that must not be empty
INTEGERS = (-(2**63), 2**63 - 1)


@dataclass(frozen=True)
class Limits(LimitConfig):
    """Checks requests against the config."""

    @classmethod
    def of(cls, config: LimitConfig) -> Limits:
        """The limits of a config that holds more than limits."""
        return cls(**{field.name: getattr(config, field.name) for field in fields(LimitConfig)})

    def range_of(self, request: str, name: str) -> tuple[int, int] | None:
        """Minimum and maximum of a field of a request type, if it has bounds."""
        if name == "k":
            return 1, self.max_candidates if request == "Recall" else self.max_k
        return {"candidates": (1, self.max_candidates), "limit": (1, MAX_IDS)}.get(name)

    def longest(self) -> dict[str, int]:
        """The longest lists in requests, by name of the field."""
        return {
            "items": self.max_candidates,
            "channels": MAX_CHANNELS,
            "fields": MAX_FIELDS,
            "boost": MAX_BOOSTS,
        }

    def check(self, request: msgspec.Struct) -> None:
        """Raise BadRequest, with the name of the field, when a request exceeds a limit."""
        for name in request.__struct_fields__:
            value = getattr(request, name)
            if bounds := self.range_of(type(request).__name__, name):
                _check_range(name, value, *bounds)
            elif name == "deadline_ms" and value is not None and not 0 < value <= MAX_DEADLINE_MS:
                raise BadRequest(
                    f"deadline_ms must be above 0 and at most {MAX_DEADLINE_MS:,.0f}, got {value}."
                )
            elif isinstance(value, list):
                self._check_list(name, value)
            elif value == "" and (type(request).__name__, name) in IDS:
                raise BadRequest(f"{name} must not be empty.")
            else:
                _check_value(name, value)

    def check_number(self, number: int, what: str) -> None:
        """Raise BadRequest when a list is empty or too long."""
        if not 1 <= number <= self.max_batch:
            raise BadRequest(f"{what} must hold 1 to {self.max_batch:,} values, got {number:,}.")

    def check_json(self, text: bytes) -> None:
        """Raise BadRequest when a body holds so many values that parsing them would hold up other requests."""
        if text.count(b",") >= MAX_JSON_VALUES:
            raise BadRequest(
                f"The JSON holds more than {MAX_JSON_VALUES:,} values. Send fewer at once, or tensors as bytes."
            )

    def _check_list(self, name: str, values: list[Any]) -> None:
        longest = self.longest().get(name, MAX_IDS)
        if len(values) > longest:
            raise BadRequest(f"{name} must hold at most {longest:,} values, got {len(values):,}.")
        for value in values:
            if isinstance(value, msgspec.Struct):
                self.check(value)
            else:
                _check_value(name, value)


def _check_range(name: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise BadRequest(f"{name} must be a whole number from {low} to {high:,}, got {value}.")


def _check_value(name: str, value: Any) -> None:
    if type(value) is int and not INTEGERS[0] <= value <= INTEGERS[1]:
        raise BadRequest(f"{name} must fit into 64 bits, got a number of {len(str(abs(value)))} digits.")
    if type(value) is str and len(value) > MAX_TEXT:
        raise BadRequest(f"{name} must be a text of at most {MAX_TEXT:,} characters, got {len(value):,}.")


def check_sizes(k: int, candidates: int) -> None:
    if not 1 <= k <= MAX_K:
        raise BadRequest(f"k must be from 1 to {MAX_K:,}, got {k}.")
    if not 0 <= candidates <= MAX_CANDIDATES:
        raise BadRequest(f"At most {MAX_CANDIDATES:,} candidates or items at once, got {candidates:,}.")


def decode_json(decoder: msgspec.json.Decoder[Any], body: bytes) -> Any:
    """Decode JSON; raises BadRequest with position and reason when the body does not fit the type."""
    try:
        return decoder.decode(body)
    except UnicodeDecodeError:
        raise BadRequest("The body is invalid: it is not all UTF-8.") from None
    except (msgspec.DecodeError, RecursionError) as error:
        raise BadRequest(f"{error}.") from None
