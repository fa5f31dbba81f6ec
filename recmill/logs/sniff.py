"""Format detection from a file's bytes: format, encoding, separator, quotes, header.

File names alone decide nothing.
"""

from __future__ import annotations

import codecs
import csv
import io
import json
import re
from collections import Counter
from collections.abc import Sequence, Set
from dataclasses import dataclass, replace
from typing import Any, Literal

from recmill.errors import LogError
from recmill.logs.base import LogFile
from recmill.logs.files import decompressed, explained, is_parquet, open_bytes
from recmill.recipe.names import plain_name
from recmill.recipe.recipe import Column, Encoding, Files, TextFormat

_HEAD_BYTES = 1 << 20
_SCANNED_BYTES = 256 << 20  # for the encoding and for escaped quotes, which may first occur late
_CHUNK_BYTES = 4 << 20
_NUM_LINES = 200
# Of two that split the lines equally well, the earlier one.
_SEPARATORS = ("\x01", "\t", "::", ", ", "; ", ",", ";", "||", "|", " ")
_ALIKE = 0.9  # fraction of the lines with the most common number of fields
_NUMBER = re.compile(r"\s*[-+]?(\d+([.,]\d*)?|[.,]\d+)([eE][-+]?\d+)?\s*")
_DATE = re.compile(r"\s*\d{1,4}[-/.]\d{1,2}[-/.]\d{1,4}([T ].*)?")
_FOREIGN = {
    b"PK\x03\x04": "a zip archive or an Excel sheet; unpack it, or save it as CSV",
    b"BZh": "compressed by bzip2; write it as plain text, .gz or .zst",
    b"\xfd7zXZ": "compressed by xz; write it as plain text, .gz or .zst",
    b"SQLite format 3": "an SQLite database; export the table as CSV",
    b"\x89HDF": "an HDF5 file; write its rows as Parquet or CSV",
    b"ARROW1": "an Arrow file; write its rows as Parquet",
    b"Obj\x01": "an Avro file; write its rows as Parquet",
    b"ORC": "an ORC file; write its rows as Parquet",
    b"%PDF": "a PDF",
}
_COMPRESSED = {b"\x1f\x8b": ".gz", b"\x28\xb5\x2f\xfd": ".zst"}


class HeaderUnclear(LogError):
    """The first line may be names or values."""


@dataclass(frozen=True)
class FileFormat:
    """The format of a file as in a recipe, and its column names: c1, c2, ... without a header."""

    format: Literal["delimited", "parquet", "jsonl"] = "delimited"
    separator: str = "\t"
    header: bool = False
    quote: str = ""
    escape: str = ""
    encoding: Encoding = "utf-8"
    names: tuple[str, ...] = ()


@dataclass(frozen=True)
class _TextFacts:
    """Facts from a pass over many bytes."""

    encoding: Encoding
    num_escaped_quotes: int
    num_doubled_quotes: int
    head: str


def sniff(
    file: LogFile, separator: str | None = None, header: bool | None = None, known: Sequence[str] = ()
) -> FileFormat:
    """The format of a file; raises LogError when it is unclear or unsupported.

    Given values are not guessed. `known` are names of columns, lower case without punctuation: a first line of texts
    is a header when it contains one of them.
    """
    head = _first_bytes(file)
    if is_parquet(file):
        return FileFormat("parquet")
    _refuse_foreign(file, head)
    if not head.strip():
        raise LogError(f"{file.path}: is empty. Give a file with rows.")
    facts = _scan(file, head)
    if _is_json(file, facts.head):
        return FileFormat("jsonl")
    return _sniff_delimited(file, facts, separator, header, known)


def _first_bytes(file: LogFile) -> bytes:
    with open_bytes(file) as stream, explained(file.path):
        magic = stream.read(4) if file.size >= 4 else b""
        suffix = next((suffix for start, suffix in _COMPRESSED.items() if magic.startswith(start)), None)
        if suffix is not None and not file.name.endswith(suffix):
            raise LogError(
                f"{file.path}: is compressed, but its name does not end in {suffix}. Rename it to "
                f"{file.name}{suffix}."
            )
    with open_bytes(file) as stream, decompressed(stream, file) as text, explained(file.path):
        return bytes(text.read(_HEAD_BYTES))


def _refuse_foreign(file: LogFile, head: bytes) -> None:
    for start, what in _FOREIGN.items():
        if head.startswith(start):
            raise LogError(f"{file.path}: is {what}.")
    if b"\0" in head and not _is_utf16(head):
        raise LogError(
            f"{file.path}: is not text: it has zero bytes. Expected CSV, TSV, JSON lines or Parquet."
        )


def _is_utf16(head: bytes) -> bool:
    if head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return True
    odd = head[1:2000:2]
    return len(odd) > 8 and odd.count(0) > 0.7 * len(odd)


def _scan(file: LogFile, head: bytes) -> _TextFacts:
    if _is_utf16(head):
        text = head.decode("utf-16", "ignore")
        return _TextFacts("utf-16", text.count('\\"'), text.count('""'), text)
    is_utf8, escaped, doubled, num_bytes = True, 0, 0, 0
    decoder = codecs.getincrementaldecoder("utf-8")()
    with open_bytes(file) as stream, decompressed(stream, file) as text, explained(file.path):
        while num_bytes < _SCANNED_BYTES and (chunk := bytes(text.read(_CHUNK_BYTES))):
            num_bytes += len(chunk)
            escaped += chunk.count(b'\\"')
            doubled += chunk.count(b'""')
            try:
                is_utf8 and decoder.decode(chunk)
            except UnicodeDecodeError:
                is_utf8 = False
    encoding: Literal["utf-8", "latin-1"] = "utf-8" if is_utf8 else "latin-1"
    return _TextFacts(encoding, escaped, doubled, head.decode(encoding, "ignore").removeprefix("\ufeff"))


def _is_json(file: LogFile, text: str) -> bool:
    start = text.lstrip()[:1]
    line = text.lstrip().partition("\n")[0].strip()
    if start == "[" and line.endswith(("[", "{", ",", "]")) and not line.startswith("[["):
        raise LogError(f"{file.path}: is a JSON array. Write one object a line, such as with: jq -c '.[]'")
    if start != "{":
        return False
    try:
        json.loads(line)
    except ValueError:
        raise LogError(
            f"{file.path}: begins like JSON, but its first line is not a JSON object. Write one object a line, with "
            "double quotes."
        ) from None
    return True


# what a recipe leaves open


def sniff_text(spec: Files, files: Sequence[LogFile]) -> TextFormat:
    """The format of a recipe's delimited files: its own values, and the rest from the first bytes.

    The recipe's columns say more than a guess could: their names are the header, or there are as many fields. When
    nothing fits, the format is that of TSV without a header, so that the rows are bad ones and the reader explains
    why.
    """
    file = next((file for file in files if file.size), None)
    if file is None or None not in (spec.separator, spec.header, spec.quote, spec.encoding):
        return spec.text
    try:
        head = _first_bytes(file)
    except LogError:  # the reader reports where a file is damaged
        return spec.text
    encoding: Encoding = spec.encoding or ("utf-16" if _is_utf16(head) else "utf-8")
    plain = replace(spec.text, encoding=encoding)
    text = head.decode(encoding, "ignore").removeprefix("\ufeff")
    if text.lstrip().startswith("{"):  # JSON: a matter of `format`
        return plain
    separators = [one for one in _SEPARATORS if one in text] if spec.separator is None else [spec.separator]
    forms = [_quoting(spec, text, replace(plain, separator=one)) for one in separators or ["\t"]]
    names = {plain_name(column.name_in_file) for column in spec.columns}
    splits = [_Split(form, rows, names) for form in forms if (rows := _split(text, form))]
    form = _chosen(spec, file, splits)
    return plain if form is None else _check_quotes(spec, file, text, form)


def _chosen(spec: Files, file: LogFile, splits: Sequence[_Split]) -> TextFormat | None:
    """The format of the separator that fits; None when none does."""
    header = True if any(column.in_file for column in spec.columns) else spec.header
    if header is not False and (named := [split for split in splits if split.has_names or header]):
        best = max(named, key=lambda split: (split.num_names, split.share_of(len(split.rows[0]))))
        # Words of a text may be names of columns too: then another separator fits all rows.
        others = [split for split in splits if split is not best and split.fits(spec.columns)]
        if best.num_names == len(best.names) or (best.num_names and (header or not others)):
            return replace(best.form, header=True)
    return replace(spec.text, header=True) if header else _without_header(spec, file, splits)


@dataclass(frozen=True)
class _Split:
    """The first rows of a text, split by one separator."""

    form: TextFormat
    rows: list[list[str]]
    names: Set[str]  # names of the recipe's columns

    @property
    def num_names(self) -> int:
        return sum(plain_name(cell) in self.names for cell in self.rows[0])

    @property
    def has_names(self) -> bool:
        """Whether the first row is a header: it has most of the names, in some spelling, and no numbers."""
        return 2 * self.num_names >= len(self.names) and not any(_is_value(cell) for cell in self.rows[0])

    def share_of(self, num_fields: int) -> float:
        """The fraction of rows with this many fields."""
        return sum(len(row) == num_fields for row in self.rows) / len(self.rows)

    def fits(self, columns: Sequence[Column]) -> bool:
        """Whether nearly all rows have a field for each column, and hardly any number contains a separator."""
        if self.share_of(len(columns)) < _ALIKE:
            return False
        rows = [row for row in self.rows[1:] if len(row) == len(columns)]  # the first may be a header
        of_numbers = [index for index, column in enumerate(columns) if column.type in ("int", "float")]
        cells = [row[index] for row in rows for index in of_numbers]
        return sum(map(_is_one_field, cells)) >= _ALIKE * len(cells)


def _without_header(spec: Files, file: LogFile, splits: Sequence[_Split]) -> TextFormat | None:
    """The format whose rows have a field for each column; None when there is none."""
    num_fields = len(spec.columns)
    fitting = [split for split in splits if split.fits(spec.columns)]
    if not fitting:
        return None
    best, rows = fitting[0].form, fitting[0].rows
    others = [split.form.separator for split in fitting if split.form.separator not in best.separator]
    if others:
        raise LogError(
            f"{file.path}: {' and '.join(map(json.dumps, (best.separator, *others)))} both divide its lines into "
            f"{num_fields} fields; the first is {_shown(best.separator.join(rows[0]))}. Set separator in the recipe."
        )
    if spec.header is None and _is_unlike(rows):
        raise LogError(
            f"{file.path}: is the first line a header? It is {form_line(rows[0])}, and no name in it is a column of "
            "the recipe. Name columns as the file does, or set header = false in the recipe."
        )
    return best


def _is_unlike(rows: Sequence[Sequence[str]]) -> bool:
    """Whether the first row has only texts, some of them in columns of numbers or dates."""
    first, rest = rows[0], [row for row in rows[1:] if len(row) == len(rows[0])]
    if any(_is_value(cell) or not cell for cell in first):
        return False
    return any(all(map(_is_value, column)) for column in zip(*rest, strict=True))


def _quoting(spec: Files, text: str, form: TextFormat) -> TextFormat:
    """The format with quotes when fields are quoted: from the first character to the last, in each that begins so."""
    quoted = replace(form, quote='"')
    if spec.quote is not None or not _has_quoted_fields(text, quoted):
        return form
    escapes = ["\\", ""] if spec.escape is None and '\\"' in text else [form.escape]
    for candidate in (replace(quoted, escape=escape) for escape in escapes):
        if _is_strict(text, candidate):
            return candidate
    return form


def _check_quotes(spec: Files, file: LogFile, text: str, form: TextFormat) -> TextFormat:
    """The format; raises LogError when its fields look quoted but not all are."""
    if spec.quote is None and not form.quote:
        cells = [cell for row in _split(text, form) for cell in row if cell.startswith('"')]
        if sum(len(cell) > 1 and cell.endswith('"') for cell in cells) > len(cells) / 2:
            raise LogError(
                f"{file.path}: most fields that begin with a quote end with one, but not all. Set quote in the "
                'recipe: \'"\' for quoted fields, or "" for none.'
            )
    return form


def _is_strict(text: str, form: TextFormat) -> bool:
    """Whether no field continues after its closing quote, or lacks one; the last field of a cut text may lack it."""
    rows, num_lines = _reader(text, form, strict=True), 0
    try:
        for _ in rows:
            num_lines = rows.line_num
    except csv.Error as error:
        is_cut = len(text) >= _HEAD_BYTES // 4
        return is_cut and "unexpected end" in str(error) and num_lines >= _ALIKE * text.count("\n")
    return True


# delimited text


def _sniff_delimited(
    file: LogFile, facts: _TextFacts, separator: str | None, header: bool | None, known: Sequence[str]
) -> FileFormat:
    quote = '"' if re.search(r'(^|[^\w\s])\s*"|"\s*($|[^\w\s])', facts.head, re.MULTILINE) else ""
    escape = "\\" if quote and facts.num_escaped_quotes else ""
    found = FileFormat("delimited", "", False, quote, escape, facts.encoding)
    if separator is not None:
        rows = _split(facts.head, replace(found, separator=separator))
        found = replace(found, separator=separator)
    else:
        found, rows = _best_separator(file, facts.head, found)
    if quote and not _has_quoted_fields(facts.head, found):
        found = replace(found, quote="", escape="")
        rows = _split(facts.head, found)
    num_fields = _common_size(rows)[0]
    rows = [row for row in rows if len(row) == num_fields]
    has_header = _has_header(file, rows, known) if header is None else header
    names = [name.strip() for name in rows[0]] if has_header else [f"c{i + 1}" for i in range(num_fields)]
    if has_header and len(rows) == 1:
        raise LogError(f"{file.path}: has a header ({', '.join(names[:8])}) but no rows.")
    return replace(found, header=has_header, names=tuple(names))


def _reader(text: str, form: FileFormat | TextFormat, strict: bool = False) -> Any:
    separator = form.separator
    if len(separator) > 1:
        text, separator = text.replace(form.separator, "\x1f"), "\x1f"
    options: Any = {"quotechar": form.quote} if form.quote else {"quoting": csv.QUOTE_NONE}
    csv.field_size_limit(1 << 24)
    return csv.reader(
        io.StringIO(text, newline=""),
        delimiter=separator,
        escapechar=form.escape or None,
        strict=strict,
        **options,
    )


def _split(text: str, form: FileFormat | TextFormat) -> list[list[str]]:
    """The fields of the first lines, without the last line, which may be cut off."""
    rows = []
    try:
        for row in _reader(text, form):
            if row:
                rows.append(row)
            if len(rows) > _NUM_LINES:
                break
    except csv.Error:
        pass
    is_cut = len(text) >= _HEAD_BYTES // 4 and len(rows) <= _NUM_LINES
    return rows[:-1] if is_cut and len(rows) > 1 else rows[:_NUM_LINES]


def _best_separator(file: LogFile, text: str, form: FileFormat) -> tuple[FileFormat, list[list[str]]]:
    best: tuple[float, int, FileFormat, list[list[str]]] | None = None
    for separator in _SEPARATORS:
        if separator not in text:
            continue
        # A backslash before a quote may also end a field: the reading that splits the lines better wins.
        for escape in dict.fromkeys((form.escape, "")):
            candidate = replace(form, separator=separator, escape=escape)
            rows = _split(text, candidate)
            size, share = _common_size(rows)
            if size > 1 and share >= _ALIKE and (best is None or (share, size) > best[:2]):
                best = (share, size, candidate, rows)
    if best is None:
        raise LogError(
            f"{file.path}: no separator gives its lines the same number of fields; the first line is "
            f"{_shown(text)}. Write the file as CSV; or, if it is the log, give --separator."
        )
    return best[2], best[3]


def _common_size(rows: Sequence[Sequence[str]]) -> tuple[int, float]:
    """The most common number of fields, and the fraction of rows that have it."""
    if not rows:
        return 0, 0.0
    size, count = Counter(map(len, rows)).most_common(1)[0]
    return size, count / len(rows)


def _has_quoted_fields(text: str, form: FileFormat | TextFormat) -> bool:
    separator, quote = re.escape(form.separator), re.escape(form.quote)
    return re.search(rf"(^|{separator}){quote}", text, re.MULTILINE) is not None


def _has_header(file: LogFile, rows: Sequence[Sequence[str]], known: Sequence[str]) -> bool:
    first, rest = rows[0], rows[1:]
    if any(_is_value(cell) for cell in first):
        return False
    if any(plain_name(cell) in known for cell in first):
        return True
    columns = list(zip(*rest, strict=True))
    if any(all(_is_value(cell) or not cell for cell in column) and any(column) for column in columns):
        return True
    raise HeaderUnclear(
        f"{file.path}: is the first line a header? It is: {form_line(first)}. Give --header yes or --header no."
    )


def form_line(cells: Sequence[str]) -> str:
    return _shown(", ".join(cells))


def _is_value(cell: str) -> bool:
    """Whether a cell is a number or a date, which no name is."""
    return _NUMBER.fullmatch(cell) is not None or _DATE.fullmatch(cell) is not None


def _is_one_field(cell: str) -> bool:
    """Whether a cell is a number, or a word such as NA."""
    return _NUMBER.fullmatch(cell) is not None or not any(one in cell.strip() for one in _SEPARATORS)


def _shown(text: str) -> str:
    line = text.strip().partition("\n")[0].strip()
    printable = "".join(character if character.isprintable() else "?" for character in line[:80])
    return f'"{printable}"' + ("..." if len(line) > 80 else "")
