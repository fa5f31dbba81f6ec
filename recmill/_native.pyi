"""Types of the native kernels; what they promise is in the sources under native/."""

from collections.abc import Sequence
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]

def explain_aborts(text: str, code: int) -> None: ...
def save_address_space() -> None: ...
def hash_ints(values: Array, seed: int) -> Array: ...
def hash_texts(offsets: Array, bytes: Array, seed: int) -> Array: ...
def hash_lists(offsets: Array, element_hashes: Array) -> Array: ...
def fold_column(states: Array, values: Array, mask: Array | None) -> None: ...
def sum_states(states: Array) -> tuple[int, int]: ...
def exact_moments(values: Array, mask: Array | None) -> tuple[int, Array, Array, float, float]: ...

class IntCounter:
    size: int
    num_bytes: int
    missing: int
    def __init__(self, track_first: bool) -> None: ...
    def add(self, values: Array, mask: Array | None, counts: Array | None, firsts: Array | None) -> None: ...
    def drain(self) -> tuple[Array, Array, Array]: ...

class TextCounter:
    size: int
    num_bytes: int
    missing: int
    def __init__(self, track_first: bool) -> None: ...
    def add(
        self, offsets: Array, bytes: Array, mask: Array | None, counts: Array | None, firsts: Array | None
    ) -> None: ...
    def drain(self) -> tuple[Array, Array, Array, Array]: ...

class IntLookup:
    num_bytes: int
    def __init__(self, values: Array) -> None: ...
    def find(self, values: Array, mask: Array | None) -> Array: ...

class TextLookup:
    num_bytes: int
    def __init__(self, offsets: Array, bytes: Array) -> None: ...
    def find(self, offsets: Array, bytes: Array, mask: Array | None) -> Array: ...

class MappedIds:
    def __init__(self, hashes: Array, indices: Array, ids: Array | tuple[Array, Array]) -> None: ...
    def find(self, ids: list[Any]) -> Array: ...

class MappedTables:
    def __init__(self, tables: list[tuple[IntLookup | None, Array, Array | None]]) -> None: ...
    def pool(
        self,
        keys: Sequence[Array],
        offsets: Sequence[Array | None],
        is_mean: Sequence[bool],
        out: Array,
        own: Sequence[tuple[int, Array]],
    ) -> list[tuple[int, Array]]: ...

class EmbeddingDisk:
    def __init__(self, folder: str, memory_bytes: int, /) -> None: ...

class EmbeddingTable:
    num_states: int
    def evict_older_than(self, step: int, /) -> int: ...
    def evict_smaller_than(self, norm: float, /) -> int: ...
    def evict_to(self, capacity: int, /) -> int: ...
    def least_frequent(self, size: int, /) -> tuple[Array, Array, Array]: ...
    def owners_of(self, keys: Array, num_owners: int, /) -> Array: ...
    def remove(self, keys: Array, /) -> int: ...
    def mark_saved(self) -> None: ...
    def load(self, keys: Array, rows: Array, states: Array, counts: Array, steps: Array, /) -> None: ...
    def load_waiting(
        self, keys: Array, counts: Array, steps: Array, bloom: Array, rows: Array, states: Array, /
    ) -> None: ...
    def statistics(self) -> dict[str, int]: ...

class EmbeddingLookup:
    unique_keys: Array
    inverse: Array

class EmbeddingSnapshot:
    removed: Array
    waiting: tuple[Array, Array, Array, Array, Array, Array]
    def __init__(self, table: EmbeddingTable, delta: bool, /) -> None: ...
    def next_piece(self) -> tuple[Array, Array, Array, Array, Array] | None: ...
    def close(self) -> None: ...

def embedding_table(
    name: str,
    dim: int,
    num_rows: int,
    init_scale: float,
    seed: int,
    optimizer: str,
    parameters: dict[str, float],
    admit_after: int,
    bloom_counters: int,
    shared_rows: int,
    disk: EmbeddingDisk | None,
    num_owners: int = 1,
) -> EmbeddingTable: ...

EmbeddingSegment = tuple[int, Array, Array | None, Array | None, int, Array | None]

def lookup_tables(
    tables: Sequence[EmbeddingTable],
    segments: Sequence[EmbeddingSegment],
    train: bool,
    step: int,
    num_threads: int,
    /,
) -> list[EmbeddingLookup]: ...
def pool_tables(
    lookups: Sequence[EmbeddingLookup], segments: Sequence[EmbeddingSegment], num_threads: int, /
) -> None: ...
def update_tables(
    lookups: Sequence[EmbeddingLookup],
    segments: Sequence[EmbeddingSegment],
    learning_rate: float,
    step: int,
    num_threads: int,
    /,
) -> None: ...

class EmbeddingRequest:
    keys: Array
    counts: Array
    sizes: Array

def request_keys(
    tables: Sequence[EmbeddingTable],
    segments: Sequence[EmbeddingSegment],
    num_owners: int,
    num_threads: int,
    /,
) -> EmbeddingRequest: ...
def pool_rows(
    request: EmbeddingRequest, segments: Sequence[EmbeddingSegment], rows: Array, num_threads: int, /
) -> None: ...
def sum_gradients(
    request: EmbeddingRequest, segments: Sequence[EmbeddingSegment], dim: int, num_threads: int, /
) -> Array: ...
def lookup_parts(
    tables: Sequence[EmbeddingTable],
    sizes: Array,
    keys: Array,
    counts: Array,
    train: bool,
    step: int,
    rows: Array,
    num_threads: int,
    /,
) -> list[EmbeddingLookup]: ...
def update_parts(
    lookups: Sequence[EmbeddingLookup],
    sizes: Array,
    grads: Array,
    learning_rate: float,
    step: int,
    num_threads: int,
    /,
) -> None: ...
def __getattr__(name: str) -> Any: ...

class Repeats:
    @property
    def features(self) -> list[int]: ...

def norm(values: Array, /) -> float: ...
def find_repeats(ids: Sequence[Array | None], width: int) -> Repeats | None: ...

class PackedMlp:
    def __init__(
        self, sizes: Sequence[int], relus: Sequence[bool], trains: bool, target: str = ""
    ) -> None: ...
    def pack(self, weights: Sequence[Array], biases: Sequence[Array]) -> None: ...
    def pack_layer(self, layer: int, weights: Array, bias: Array) -> None: ...
    def hidden_size(self, rows: int) -> int: ...
    def forward(
        self,
        inputs: Array,
        outputs: Array,
        hidden: Array | None = None,
        repeats: Repeats | None = None,
        begin: int = 0,
    ) -> None: ...
    def backward(
        self,
        inputs: Array,
        hidden: Array,
        outputs: Array,
        output_grads: Array,
        weight_grads: Sequence[Array],
        bias_grads: Sequence[Array],
        input_grads: Array | None = None,
        repeats: Repeats | None = None,
        begin: int = 0,
        first_weights: Array | None = None,
    ) -> None: ...

def dense_target() -> str: ...
def dense_targets() -> list[str]: ...
def measure_dense_kernels(
    target: str, rows: int, width: int, next_width: int, seconds: float, /
) -> list[float]: ...
def related_items(
    offsets: Array,
    items: Array,
    num_items: int,
    max_gap: int,
    own_power: float,
    other_power: float,
    shrink: float,
    n: int,
    threads: int,
    /,
) -> tuple[Array, Array, Array]: ...
def co_counts(offsets: Array, items: Array, weights: Array, num_items: int, threads: int, /) -> Array: ...
def recommend_related(
    offsets: Array,
    items: Array,
    profile_weights: Array,
    neighbours: NeighbourLists,
    banned_offsets: Array,
    banned: Array,
    allowed: Array | None,
    k: int,
) -> tuple[Array, Array]: ...

class Search: ...

class VectorClusters:
    def __init__(self, centers: Array, codes: Array, items: Array, sizes: Array) -> None: ...
    def search(
        self,
        built: Array,
        hidden: Array | None,
        changed_items: Array,
        changed: Array,
        query: Array,
        probes: int,
    ) -> Search: ...

def search_all(
    built: Array, hidden: Array | None, changed_items: Array, changed: Array, query: Array
) -> Search: ...

class NeighbourLists:
    def __init__(self, offsets: Array, indices: Array, weights: Array, items: Array | None) -> None: ...
    def search(self, profile: Array, weights: Array) -> Search: ...

def run_searches(
    searches: Sequence[Search], k: int, banned: Array, allowed: Array | None
) -> list[tuple[Array, Array]]: ...
def first_shown(items: Array, banned: Array, allowed: Array | None, k: int) -> Array: ...
def best_of(scores: Array, items: Array, k: int) -> Array: ...
def fuse_lists(
    lists: Sequence[tuple[Array, Array, Array, int]], number: int
) -> tuple[Array, Array, Array, Array]: ...
def unique_items(arrays: Sequence[Array]) -> Array: ...

Linear = tuple[Array, Array]  # weights [out, in] and bias

class ItemTables:
    def __init__(
        self,
        tables: list[tuple[IntLookup | None, Array, Array | None]],
        keys: Array,
        key_columns: Array,
        numbers: Array,
        number_columns: Array,
        known: Array,
    ) -> None: ...

class Ranker:
    def __init__(
        self,
        is_dot: bool,
        user_numbers: int,
        item_numbers: int,
        user_vectors: int,
        dim: int,
        dims: Sequence[int],
        projections: Sequence[Array | None],
        bottom: Sequence[Linear],
        once: Linear,
        each: Array,
        rest: Sequence[Linear],
        target: str = "",
        serving_target: str = "",
    ) -> None: ...
    def use_bytes(self, inputs: Array, hidden: Sequence[Array]) -> None: ...
    def rank(
        self,
        user_numbers: Array,
        user_vectors: Array,
        item_numbers: Array,
        features: list[Any],
        user_wide: float,
        wide: list[Any],
    ) -> tuple[Array, Array, list[int]]: ...
    def rank_items(
        self,
        user_numbers: Array,
        user_vectors: Array,
        user_wide: float,
        items: ItemTables,
        indices: Array,
        added_keys: Array,
        added_numbers: Array,
        rows: list[tuple[int, Array]],
    ) -> tuple[Array, Array, list[int]]: ...
    def ranges(
        self, user_numbers: Array, user_vectors: Array, item_numbers: Array, features: list[Any]
    ) -> tuple[Array, list[Array]]: ...

class Tower:
    def __init__(self, layers: Sequence[Linear]) -> None: ...
    def vectors(self, inputs: Array) -> Array: ...

def encode_items(items: list[Any]) -> bytes | None: ...
def serving_targets() -> list[str]: ...

class GzipStream:
    is_finished: bool
    def __init__(self) -> None: ...
    @staticmethod
    def at(offset: int, bit: int, window: bytes) -> GzipStream: ...
    def feed(self, bytes: bytes) -> None: ...
    def read(self, into: Array) -> int: ...
    def mark_every(self, spacing: int) -> None: ...
    def take_marks(self) -> list[tuple[int, int, bytes]]: ...

class Rings:
    def __init__(self, memory: Array, rank: int, size: int, ring_bytes: int, /) -> None: ...
    @staticmethod
    def memory_size(size: int, ring_bytes: int, /) -> int: ...
    def start(self, sent: Sequence[Array], received: Sequence[Array], /) -> int: ...
    def wait(self, transfer: int, seconds: float, /) -> bool: ...
    def close(self) -> None: ...
