"""bench dense, for too short a time to say anything about speed."""

from __future__ import annotations

from recmill import _native
from recmill.stages.bench.config import DenseBenchConfig
from recmill.stages.bench.dense import LAYERS, PRODUCTS, bench_dense, describe


def test_every_product_of_every_target_has_a_rate_beside_torchs() -> None:
    result = bench_dense(DenseBenchConfig(milliseconds=0))
    assert [(layer["in"], layer["out"]) for layer in result["layers"]] == list(LAYERS)
    for layer in result["layers"]:
        assert list(layer["gflops"]) == [*_native.dense_targets(), "torch"]
        assert all(of[name] > 0 for of in layer["gflops"].values() for name in PRODUCTS)
    assert "845-1024" in describe(result)
