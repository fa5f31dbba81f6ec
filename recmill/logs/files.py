"""Locating the files of a log: names and globs under a local directory or a URL, opened as plain bytes."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import Any

import pyarrow as pa
from pyarrow import fs

from recmill.errors import LogError, first_line
from recmill.logs.base import COMPRESSIONS, LogFile
from recmill.logs.gzip_text import GzipText

_UNCHANGED = (
    "A log must not change while it is read: name only finished files, or read a copy (which keeps its times, "
    "if several machines have one each). Then run the same command again."
)
_PARQUET = b"PAR1"
FINISHED = "_SUCCESS"  # Spark's name of the file that it writes last
# bz2: pyarrow fails on files of several streams; the standard library silently drops a damaged second one.
_UNREADABLE_SUFFIXES = (".bz2", ".xz", ".zip", ".lz4", ".7z")


def find_files(patterns: Sequence[str], data: str) -> tuple[LogFile, ...]:
    """Every file that a pattern matches, once, in natural order of names: day_2 before day_10."""
    matches = {pattern: match_pattern(pattern, data) for pattern in patterns}
    missing = [pattern for pattern, files in matches.items() if not files]
    if missing or not patterns:
        raise LogError(_nothing_matches(missing, data))
    found = {file.name: file for files in matches.values() for file in files}
    return tuple(sorted(_each_once(found.values()), key=lambda file: natural_key(file.name)))


def _each_once(files: Iterable[LogFile]) -> list[LogFile]:
    """Deduplicate hard and symbolic links: keep the path with the fewest directories."""
    shortest_first = sorted(files, key=lambda file: (file.name.count("/"), natural_key(file.name)))
    found: dict[object, LogFile] = {}
    for file in shortest_first:
        found.setdefault(file.inode or file.name, file)
    return list(found.values())


def match_pattern(pattern: str, data: str) -> tuple[LogFile, ...]:
    """The files of one name or glob. `*` stays within a directory, `**` does not.

    A name also matches its compressed form: `train.txt` finds `train.txt.gz`. A directory with a file _SUCCESS, as
    Spark writes it, stands for the files in it.
    """
    filesystem, root = locate(data)
    _require_directory(filesystem, root, data)
    with explained(data):
        named = filesystem.get_file_info(_join(root, pattern))
        if named.type == fs.FileType.Directory:
            infos = _parts(filesystem, named.path)
            if not infos:
                raise LogError(
                    f'{_join(data, pattern)} is a directory. Name the files in it, such as "{pattern}/*".'
                )
        else:
            infos = [named] if named.is_file else _list_matches(filesystem, root, pattern)
        infos = infos or _compressed_forms(filesystem, root, pattern)
    files = {file.name: file for file in (_log_file(info, root, data) for info in infos)}
    return tuple(sorted(files.values(), key=lambda file: natural_key(file.name)))


def natural_key(name: str) -> tuple[list[str | int], str]:
    """Orders numbers inside names by value. Names that differ only in leading zeros stay apart."""
    return [int(part) if i % 2 else part for i, part in enumerate(re.split(r"([0-9]+)", name))], name


def locate(path: str) -> tuple[Any, str]:
    """The file system of a path or URL, and the path inside it."""
    if "://" not in path:
        return fs.LocalFileSystem(), path
    with explained(path):
        filesystem, inner = fs.FileSystem.from_uri(path)
    return filesystem, inner


def open_bytes(file: LogFile) -> pa.NativeFile:
    """The file as it is on disk, seekable."""
    filesystem, inner = locate(file.path)
    with explained(file.path):
        return filesystem.open_input_file(inner)


def is_parquet(file: LogFile) -> bool:
    """Whether a file has the magic bytes of Parquet at both ends."""
    if file.size < 2 * len(_PARQUET):
        return False
    with open_bytes(file) as stream, explained(file.path):
        if stream.read(len(_PARQUET)) != _PARQUET:
            return False
        stream.seek(file.size - len(_PARQUET))
        return bool(stream.read(len(_PARQUET)) == _PARQUET)


def decompressed(stream: pa.NativeFile, file: LogFile) -> Any:
    """The file's text as a stream, not seekable if the file's suffix indicates compression."""
    if file.name.endswith(_UNREADABLE_SUFFIXES):
        raise LogError(f"{file.path}: cannot read this kind of compression. Use .gz, .zst or plain text.")
    if file.compression is None:
        return stream
    if file.size == 0:
        raise LogError(
            f"{file.path}: the {file.compression} stream is empty, not even a header. Copy it again."
        )
    return (
        GzipText(stream) if file.compression == "gzip" else pa.CompressedInputStream(stream, file.compression)
    )


@contextmanager
def explained(path: str) -> Iterator[None]:
    """Convert errors of file systems to a LogError that names the file."""
    try:
        yield
    except FileNotFoundError as error:
        raise LogError(f"{path}: no such file. Was it moved while it was being read?") from error
    except PermissionError as error:
        raise LogError(f"{path}: permission denied. Make it readable for this user.") from error
    except (OSError, pa.ArrowException) as error:
        raise LogError(f"{path}: cannot be read ({first_line(error).rstrip('.')}).") from error


def _join(directory: str, name: str) -> str:
    """Append a name to a path, or to a URL before its options."""
    path, mark, options = directory.partition("?") if "://" in directory else (directory, "", "")
    return f"{path.rstrip('/')}/{name}{mark}{options}"


def _require_directory(filesystem: Any, root: str, data: str) -> None:
    with explained(data):
        kind = filesystem.get_file_info(root).type
    if kind == fs.FileType.NotFound:
        raise LogError(f"{data}: no such directory. Give the directory that holds the log's files.")
    if kind != fs.FileType.Directory:
        raise LogError(f"{data}: is a file. Give the directory that holds it.")


def _list_matches(filesystem: Any, root: str, pattern: str) -> list[Any]:
    parts = tuple(pattern.split("/"))
    fixed = next((i for i, part in enumerate(parts) if re.search(r"[*?\[]", part)), len(parts) - 1)
    directory = _join(root, "/".join(parts[:fixed])).rstrip("/")
    recursive = len(parts) - fixed > 1
    if recursive and isinstance(filesystem, fs.LocalFileSystem):
        infos = filesystem.get_file_info(_walk(directory, parts[fixed:]))
    else:
        infos = filesystem.get_file_info(
            fs.FileSelector(directory, allow_not_found=True, recursive=recursive)
        )
        infos = [info for info in infos if _matches(_relative(info, root).split("/"), parts)]
    return [file for info in infos for file in ([info] if info.is_file else _parts(filesystem, info.path))]


def _parts(filesystem: Any, directory: str) -> list[Any]:
    """The files in a directory that Spark, or we, finished writing; none if it is another directory."""
    infos = filesystem.get_file_info(fs.FileSelector(directory, allow_not_found=True))
    if all(info.base_name != FINISHED for info in infos):
        return []
    return [info for info in infos if info.is_file and not info.base_name.startswith((".", "_"))]


def _walk(directory: str, patterns: tuple[str, ...]) -> list[str]:
    """The matching files and directories below a local directory.

    A directory is visited once for each rest of the patterns, by whatever links it is reached, so that loops end.
    """
    found, entered = [], set()
    waiting = [(directory, patterns)] if os.path.isdir(directory) else []
    for folder, left in waiting:
        if (state := (_inode(folder), left)) in entered:
            continue
        entered.add(state)
        for entry in sorted(os.scandir(folder), key=lambda entry: (entry.is_symlink(), entry.name)):
            rests = _rests(entry.name, left)
            if os.path.isdir(entry.path):
                waiting += [(entry.path, rest) for rest in rests if rest]
            if () in rests and os.path.exists(entry.path):
                found.append(entry.path)
    return found


def _compressed_forms(filesystem: Any, root: str, name: str) -> list[Any]:
    infos = filesystem.get_file_info([_join(root, name + suffix) for suffix in COMPRESSIONS])
    return [info for info in infos if info.is_file]


def _matches(names: list[str], patterns: tuple[str, ...]) -> bool:
    left = {patterns}
    for name in names:
        left = {rest for patterns in left for rest in _rests(name, patterns)}
    return () in left


def _rests(name: str, patterns: tuple[str, ...]) -> list[tuple[str, ...]]:
    """The rest of the patterns below a name; nothing when the name does not match."""
    if not patterns:
        return []
    is_hidden = name.startswith((".", "_"))
    if patterns[0] == "**":
        return _rests(name, patterns[1:]) + ([] if is_hidden else [patterns])
    # Hidden files and those with an underscore are not data unless named: _SUCCESS, _truth.json, .crc files.
    is_match = fnmatchcase(name, patterns[0]) and not (is_hidden and patterns[0][0] != name[0])
    return [patterns[1:]] if is_match else []


def _relative(info: Any, root: str) -> str:
    return str(info.path)[len(root.rstrip("/")) + 1 :]


def _log_file(info: Any, root: str, data: str) -> LogFile:
    name = _relative(info, root)
    path = _join(data, name)
    return LogFile(path, name, info.size or 0, info.mtime_ns, _inode(path))


def _inode(path: str) -> tuple[int, int] | None:
    """The inode of a local file, by its path or file:// URL."""
    filesystem, inner = locate(path)
    if not isinstance(filesystem, fs.LocalFileSystem):
        return None
    with explained(path):
        status = os.stat(inner)
    return status.st_dev, status.st_ino


def check_unchanged(files: Iterable[LogFile], may_grow: bool = False, same_machine: bool = False) -> None:
    """Raise LogError when a file's size or time has changed since it was opened.

    On the machine that opened it, its inode counts too; copies on other machines have others.
    """
    for file in files:
        filesystem, inner = locate(file.path)
        with explained(file.path):
            info = filesystem.get_file_info(inner)
        if not info.is_file:
            raise LogError(f"{file.path}: no such file: it was removed while it was being read. {_UNCHANGED}")
        if same_machine and file.inode is not None and _inode(file.path) != file.inode:
            raise LogError(f"{file.path}: was replaced while it was being read. {_UNCHANGED}")
        if may_grow and info.size >= file.size:
            continue
        if (info.size, info.mtime_ns) != (file.size, file.modified_ns):
            raise LogError(
                f"{file.path}: changed while it was being read: {_version(info.size, info.mtime_ns)} now, "
                f"{_version(file.size, file.modified_ns)} when it was found. {_UNCHANGED}"
            )


def _version(size: int, modified_ns: int | None) -> str:
    if modified_ns is None:
        return f"{size:,} bytes"
    seconds = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(modified_ns // 10**9))
    return f"{size:,} bytes of {seconds}.{modified_ns % 10**9:09d} UTC"


def _nothing_matches(missing: list[str], data: str) -> str:
    if not missing:
        return f"The log names no files. Set files in the recipe to names or globs under {data}."
    wanted = ", ".join(f'"{pattern}"' for pattern in missing)
    return (
        f"No file matches {wanted} in {data}. It holds: {_listing(data)}. Correct `files` or the directory."
    )


def _listing(data: str, at_most: int = 10) -> str:
    filesystem, root = locate(data)
    with explained(data):
        infos = filesystem.get_file_info(fs.FileSelector(root))
    names = sorted((_relative(i, root) + "/" * (not i.is_file) for i in infos), key=natural_key)
    more = [f"and {len(names) - at_most:,} more"] if len(names) > at_most else []
    return ", ".join(names[:at_most] + more) or "nothing"
