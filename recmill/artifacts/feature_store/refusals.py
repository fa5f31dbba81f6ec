"""What a Redis that answers refuses to do, in words that quote nothing of the command: it may hold users' columns."""

from __future__ import annotations

_OUT_OF_MEMORY = (
    "its memory is full. Raise maxmemory or load one side only (--side), then load again with --resume. "
    "Keep maxmemory-policy noeviction: others evict rows."
)
_BY_CODE = {
    "MISCONF": "it cannot save to its disk. Free the disk, or turn its snapshots off.",
    "NOREPLICAS": "too few of its replicas are there.",
    "WRONGTYPE": "other values are under its keys. Use a prefix of their own (--prefix).",
}


def refusal_of(error: Exception) -> str | None:
    """Why Redis refused a command and what to do about it; None when it gave no answer."""
    from redis import exceptions as kinds

    if not isinstance(error, kinds.ResponseError) or isinstance(error, kinds.ClusterDownError):
        return None
    if isinstance(error, kinds.OutOfMemoryError):
        return _OUT_OF_MEMORY
    if isinstance(error, kinds.NoPermissionError):
        return "its user may not. Give it read and write permission for these keys."
    if isinstance(error, kinds.ReadOnlyError):
        return "it is a replica. Name its master or its sentinels."
    if isinstance(error, kinds.AskError):
        return "this part of the cluster is moving."
    code = str(error).partition(" ")[0]
    return _BY_CODE.get(code, f"it answers {code if code.isupper() else type(error).__name__}.")
