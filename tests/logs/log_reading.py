"""Reading for tests: everything a source gives, as plain Python, and slow twins of the parsers."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recmill.logs.base import BadRow, LogFiles, open_source
from recmill.recipe.recipe import POSITION, Column, Log


@dataclass
class Everything:
    rows: list[tuple[Any, ...]]  # position first, then the declared columns
    bad: list[BadRow]
    num_rows: int

    @property
    def values(self) -> list[tuple[Any, ...]]:
        return [row[1:] for row in self.rows]

    @property
    def reasons(self) -> list[tuple[str, str | None]]:
        return [(row.reason, row.column) for row in self.bad]


def read_all(source: LogFiles, parts: int = 1, chunk_bytes: int = 8 << 20) -> Everything:
    """All rows in the order of units, checked against the source's own schema and counts."""
    rows: list[tuple[Any, ...]] = []
    bad: list[BadRow] = []
    num_rows = 0
    for unit in source.units(parts=parts):
        in_unit = 0
        for batch in source.read(unit, chunk_bytes):
            assert dict(batch.frame.schema) == source.schema
            assert batch.num_rows == len(batch.frame) + len(batch.bad)
            frame = batch.frame.select(POSITION, *[c.name for c in source.columns])
            rows += frame.rows()
            bad += batch.bad
            in_unit += batch.num_rows
        assert source.count_rows(unit) == in_unit
        num_rows += in_unit
    return Everything(rows, bad, num_rows)


def columns_of(**types: str) -> tuple[Column, ...]:
    return tuple(Column(name, type_name) for name, type_name in types.items())  # type: ignore[arg-type]


def read_text(directory: Path, text: bytes, columns: tuple[Column, ...], **log: Any) -> Everything:
    (directory / "log.txt").write_bytes(text)
    return read_all(open_source(Log(files=("log.txt",), columns=columns, **log), str(directory)))


def cut_lines(text: bytes) -> list[tuple[int, bytes]]:
    """Offset and bytes of each line, newline excluded."""
    lines, offset = [], 0
    for line in text.split(b"\n"):
        lines.append((offset, line))
        offset += len(line) + 1
    return lines if lines[-1][1] else lines[:-1]


def parse_cell(kind: str, cell: bytes) -> Any:
    """The value of a delimited field; ValueError if there is none."""
    if cell == b"":
        return None
    if kind == "text":
        return cell.decode()
    patterns = {
        "int": rb"[+-]?[0-9]+(\.0+)?",
        "float": rb"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?",
        "hex": rb"(0[xX])?[0-9a-fA-F]{1,16}",
        "bool": rb"0|1|true|false|True|False",
    }
    if not re.fullmatch(patterns[kind], cell):
        raise ValueError
    if kind == "bool":
        return cell in (b"1", b"true", b"True")
    if kind == "hex":
        return (int(cell, 16) + 2**63) % 2**64 - 2**63
    value = int(cell.split(b".")[0]) if kind == "int" else float(cell)
    if not (-(2**63) <= value < 2**63 if kind == "int" else math.isfinite(value)):
        raise ValueError
    if kind == "float" and value == 0 and re.search(rb"[1-9]", re.split(rb"[eE]", cell)[0]):
        raise ValueError  # too small to be held
    return value


def parse_fields(kinds: list[str], fields: list[bytes]) -> tuple[Any, ...] | None:
    if len(fields) != len(kinds):
        return None
    try:
        return tuple(parse_cell(kind, cell) for kind, cell in zip(kinds, fields, strict=True))
    except ValueError:
        return None


def split_quoted(text: bytes, separator: bytes, quote: bytes) -> list[tuple[int, int, list[bytes] | None]]:
    """Begin, end and fields of each row, one byte at a time; no fields for a row that breaks the rules."""
    rows, begin = [], 0
    while begin < len(text):
        end, fields = _split_quoted_row(text, begin, separator, quote)
        rows.append((begin, end, fields))
        begin = end
    return rows


def _split_quoted_row(
    text: bytes, begin: int, separator: bytes, quote: bytes
) -> tuple[int, list[bytes] | None]:
    fields: list[bytes] = []
    at, broken = begin, False
    while True:
        field, quoted = b"", text[at : at + 1] == quote
        if quoted:
            at += 1
            while True:
                if at >= len(text):
                    newline = text.find(b"\n", begin)
                    return (newline + 1 if newline >= 0 else len(text)), None
                if text[at : at + 2] == quote * 2:
                    field, at = field + quote, at + 2
                elif text[at : at + 1] == quote:
                    at += 1
                    break
                else:
                    field, at = field + text[at : at + 1], at + 1
        rest = b""
        while at < len(text) and text[at : at + 1] != b"\n" and not text.startswith(separator, at):
            rest, at = rest + text[at : at + 1], at + 1
        ends_row = at >= len(text) or text[at : at + 1] == b"\n"
        rest = rest.removesuffix(b"\r") if ends_row else rest
        broken = broken or (quoted and rest != b"")
        fields.append(field + rest)
        if ends_row:
            return min(at + 1, len(text)), None if broken else fields
        at += len(separator)
