"""Explains refusals of Redis; a circuit breaker for servers that do not answer."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from recmill.artifacts.feature_store.address import Address
from recmill.errors import StoreError

_REST_SECONDS = 0.25  # how long the circuit breaker stays open
_TIMEOUTS_IN_A_ROW = 3
# What Redis refuses, without quoting the command: it may hold columns of users.
_OUT_OF_MEMORY = (
    "its memory is full. Raise maxmemory or load one side only (--side), then load again with --resume. "
    "Keep maxmemory-policy noeviction: others evict rows."
)
_BY_CODE = {
    "MISCONF": "it cannot save to its disk. Free the disk, or turn its snapshots off.",
    "NOREPLICAS": "too few of its replicas are connected.",
    "WRONGTYPE": "other values are under its keys. Use a prefix of their own (--prefix).",
}


def refusal_of(error: Exception) -> str | None:
    """Why Redis refused a command and what to do about it; None when it did not answer."""
    from redis import exceptions as kinds

    if not isinstance(error, kinds.ResponseError) or isinstance(error, kinds.ClusterDownError):
        return None
    if isinstance(error, kinds.OutOfMemoryError):
        return _OUT_OF_MEMORY
    if isinstance(error, kinds.NoPermissionError):
        return "its user lacks permission. Give it read and write permission for these keys."
    if isinstance(error, kinds.ReadOnlyError):
        return "it is a replica. Name its master or its sentinels."
    if isinstance(error, kinds.AskError):
        return "this part of the cluster is moving."
    code = str(error).partition(" ")[0]
    return _BY_CODE.get(code, f"it answers {code if code.isupper() else type(error).__name__}.")


@dataclass
class CircuitBreaker:
    """A circuit breaker: after a failure, requests fail at once for a while; then Redis is tried again.

    `probe` tries it on a thread of its own and tells `worked` or `failed`: requests that would wait for a Redis that
    hangs would be the slowest of all. Without a probe, the next request tries.
    """

    probe: Callable[[], None] | None = None
    open_until: float = 0.0
    timeouts: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def check(self, address: Address) -> None:
        if not self.open_until:
            return
        with self.lock:
            if not self.open_until:
                return
            is_rested = time.monotonic() >= self.open_until
            if is_rested:
                self.open_until = time.monotonic() + _REST_SECONDS  # for all others, while it is tried
                if self.probe is None:
                    return
        if is_rested:
            threading.Thread(target=self.probe, name="redis-probe", daemon=True).start()
        raise StoreError(f"{address} does not answer; it is tried again in a moment.")

    def worked(self) -> None:
        if self.open_until or self.timeouts:
            with self.lock:
                self.open_until, self.timeouts = 0.0, 0

    def failed(self) -> None:
        with self.lock:
            self.open_until = time.monotonic() + _REST_SECONDS

    def timed_out(self) -> None:
        """Count a timeout. One may be due to a short deadline; several in a row are a failure of Redis."""
        with self.lock:
            self.timeouts += 1
            if self.timeouts >= _TIMEOUTS_IN_A_ROW:
                self.open_until = time.monotonic() + _REST_SECONDS
