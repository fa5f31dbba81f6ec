"""The native layers give what torch's own give, forward and backward, on every target that this CPU runs."""

from __future__ import annotations

import copy
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import numpy as np
import pytest
import torch

from recmill import _native
from recmill.learner.optimizers import dense_optimizer
from recmill.models.layers import MLP, CrossNetwork
from recmill.recipe.recipe import Optimizer

# Fewer and more than a vector, a panel and a group of rows of every target, and whole ones.
SIZES = [1, 2, 7, 8, 13, 16, 17, 31, 33, 47, 64]


def random_layers(sizes, seed):
    random = np.random.default_rng(seed)
    weights = [random.normal(size=(b, a)).astype(np.float32) for a, b in pairwise(sizes)]
    return weights, [random.normal(size=len(one)).astype(np.float32) for one in weights], random


def native_pass(target, weights, biases, relus, inputs, output_grads):
    """Outputs and all gradients, as the native layers compute them."""
    packed = _native.PackedMlp(
        [inputs.shape[1], *(len(bias) for bias in biases)], relus, trains=True, target=target
    )
    packed.pack(weights, biases)
    outputs = np.full_like(output_grads, np.nan)
    hidden = np.full(packed.hidden_size(len(inputs)), np.nan, np.float32)
    packed.forward(inputs, outputs, hidden)
    grads = [np.full_like(array, np.nan) for array in (inputs, *weights, *biases)]
    of_weights, of_biases = grads[1 : 1 + len(weights)], grads[1 + len(weights) :]
    packed.backward(
        inputs, hidden, outputs, output_grads, of_weights, of_biases, grads[0], first_weights=weights[0]
    )
    without_hidden = np.full_like(outputs, np.nan)
    packed.forward(inputs, without_hidden)
    np.testing.assert_array_equal(without_hidden, outputs)
    return outputs, *grads


def exact_pass(weights, biases, relus, inputs, output_grads):
    """The same in float64, by the chain rule."""
    activations = [inputs.astype(np.float64)]
    for weight, bias, relu in zip(weights, biases, relus, strict=True):
        product = activations[-1] @ weight.T.astype(np.float64) + bias
        activations.append(np.maximum(product, 0) if relu else product)
    grad, of_weights, of_biases = output_grads.astype(np.float64), [], []
    for number in reversed(range(len(weights))):
        if relus[number]:
            grad = grad * (activations[number + 1] > 0)
        of_weights.insert(0, grad.T @ activations[number])
        of_biases.insert(0, grad.sum(axis=0))
        grad = grad @ weights[number]
    return activations[-1], grad, *of_weights, *of_biases


def assert_close_to_exact(target, sizes, relus, rows):
    weights, biases, random = random_layers(sizes, rows)
    inputs = random.normal(size=(rows, sizes[0])).astype(np.float32)
    output_grads = random.normal(size=(rows, sizes[-1])).astype(np.float32)
    arguments = weights, biases, relus, inputs, output_grads
    for found, exact in zip(native_pass(target, *arguments), exact_pass(*arguments), strict=True):
        np.testing.assert_allclose(found, exact, rtol=0, atol=1e-5 * max(1.0, np.abs(exact).max()))


@pytest.mark.parametrize("target", _native.dense_targets())
@pytest.mark.parametrize("relu", [True, False])
def test_one_layer_of_any_size_is_as_exact_as_float32(target, relu):
    for width in SIZES:
        for next_width in SIZES:
            for rows in (1, 5, 14):
                assert_close_to_exact(target, [width, next_width], [relu], rows)


@pytest.mark.parametrize("target", _native.dense_targets())
@pytest.mark.parametrize("rows", [255, 256, 257, 600])
def test_rows_of_several_blocks_add_up(target, rows):
    assert_close_to_exact(target, [13, 64, 17, 1], [True, True, False], rows)


def test_no_row_gives_gradients_of_zero():
    weights, biases, _ = random_layers([3, 4], 0)
    none = np.empty((0, 3), np.float32), np.empty((0, 4), np.float32)
    *_, of_weights, of_biases = native_pass("", weights, biases, [True], *none)
    assert not of_weights.any()
    assert not of_biases.any()


@pytest.mark.parametrize("rows", [1, 3, 64])
@pytest.mark.parametrize("wants_input_grad", [True, False])
@pytest.mark.parametrize(
    "make",
    [
        lambda: MLP([5, 17, 9, 2], last_relu=True),
        lambda: MLP([5, 17, 9, 2], last_relu=False),
        lambda: CrossNetwork(5, 3, 2),
        lambda: CrossNetwork(5, 3, None),
    ],
    ids=["last_relu", "no_last_relu", "low_rank_cross", "full_cross"],
)
def test_native_layers_equal_torchs(rows, make, wants_input_grad, monkeypatch):
    torch.manual_seed(rows)
    layers = make()
    inputs = torch.randn(rows, 5, requires_grad=wants_input_grad)
    weights = [*layers.parameters(), *([inputs] if wants_input_grad else [])]
    found = []
    for native in (True, False):
        monkeypatch.setattr("recmill.models.layers._runs_natively", lambda _, native=native: native)
        outputs = layers(inputs)
        found.append([outputs.detach(), *torch.autograd.grad(outputs.square().sum(), weights)])
    for ours, torchs in zip(*found, strict=True):
        torch.testing.assert_close(ours, torchs, rtol=1e-5, atol=1e-5 * max(1.0, torchs.abs().max().item()))


def test_threads_that_pack_together_see_all_layers_of_the_new_weights():
    layers, inputs = MLP([64] * 8, last_relu=False), torch.randn(4, 64)
    with ThreadPoolExecutor(3) as pool:
        for _ in range(20):
            with torch.no_grad():
                for weights in layers.parameters():
                    weights.mul_(1.01)
                expected = layers(inputs)
            for found in pool.map(lambda _: layers(inputs).detach(), range(3)):
                torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_inputs_and_gradients_that_are_views_are_left_as_they_are():
    layers = MLP([4, 4], last_relu=True)
    inputs = torch.randn(4, 6).t()
    outputs = torch.cat([layers(inputs), torch.randn(6, 3)], dim=1)
    outputs.retain_grad()
    (outputs * torch.arange(7.0)).sum().backward()
    torch.testing.assert_close(outputs.grad, torch.arange(7.0).expand(6, 7))
    torch.testing.assert_close(outputs[:, :4], torch.relu(layers.layers[0](inputs)))


def test_changed_weights_are_packed_again():
    layers, inputs = MLP([4, 3], last_relu=False), torch.randn(2, 4)
    layers(inputs)
    with torch.no_grad():
        layers.layers[0].weight.mul_(2)
        layers.layers[0].bias.zero_()
    torch.testing.assert_close(layers(inputs), inputs @ layers.layers[0].weight.t())


@pytest.mark.parametrize("optimizer", ["sgd", "adagrad", "adam", "adamw", "lamb"])
def test_weights_that_an_optimizer_changed_are_packed_again(optimizer):
    layers, inputs = MLP([4, 3], last_relu=False), torch.randn(2, 4)
    layers(inputs).sum().backward()
    dense_optimizer(Optimizer(optimizer, 0.1), layers.parameters()).step(0.1)
    torch.testing.assert_close(layers(inputs), layers.layers[0](inputs))


def test_weights_that_change_before_backward_are_an_error():
    layers = MLP([4, 3], last_relu=False)
    outputs = layers(torch.randn(2, 4))
    with torch.no_grad():
        layers.layers[0].weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        outputs.sum().backward()


def test_a_copy_has_weights_of_its_own():
    layers, inputs = MLP([4, 3], last_relu=False), torch.randn(2, 4)
    before = layers(inputs).detach()
    other = copy.deepcopy(layers)
    with torch.no_grad():
        other.layers[0].weight.zero_()
    other(inputs)
    torch.testing.assert_close(layers(inputs), before)


def test_float32_training_is_native_and_the_other_ways_are_not():
    layers, inputs = MLP([4, 4], last_relu=True, dropout=0.5), torch.randn(2, 4)

    def runs_natively():
        return "NativeMLP" in str(layers(inputs).grad_fn)

    layers.train()
    assert not runs_natively()
    layers.eval()
    assert runs_natively()
    with torch.no_grad():
        assert not runs_natively()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert not runs_natively()
    layers, inputs = layers.double(), inputs.double()
    assert not runs_natively()


@pytest.mark.parametrize("target", _native.dense_targets())
@pytest.mark.parametrize(("below", "width", "sizes"), [(5, 8, [40, 3]), (0, 20, [33]), (16, 16, [64, 17, 1])])
def test_ids_that_repeat_give_the_same_when_their_vectors_are_multiplied_once(target, below, width, sizes):
    num_features, rows, relus = 4, 300, [True] * (len(sizes) - 1) + [False]
    weights, biases, random = random_layers([below + num_features * width, *sizes], 1)
    # Few ids, no ids (a list), rows of their own, some ids.
    ids = [random.integers(0, most, rows) for most in (3, 3, 1 << 40, 30)]
    vectors = [
        np.random.default_rng(f).normal(size=(rows, width))[np.unique(i, return_inverse=True)[1]]
        for f, i in enumerate(ids)
    ]
    inputs = np.concatenate([random.normal(size=(rows, below)), *vectors], axis=1).astype(np.float32)
    output_grads = random.normal(size=(rows, sizes[-1])).astype(np.float32)
    repeats = _native.find_repeats([ids[0], None, ids[2], ids[3]], width)
    assert repeats.features == [0, 3]

    packed = _native.PackedMlp([inputs.shape[1], *sizes], relus, trains=True, target=target)
    packed.pack(weights, biases)
    outputs = np.full_like(output_grads, np.nan)
    hidden = np.full(packed.hidden_size(rows), np.nan, np.float32)
    grads = [np.full_like(array, np.nan) for array in (inputs, *weights, *biases)]
    of_weights, of_biases = grads[1 : 1 + len(weights)], grads[1 + len(weights) :]
    packed.forward(inputs, outputs, hidden, repeats, below)
    packed.backward(
        inputs, hidden, outputs, output_grads, of_weights, of_biases, grads[0], repeats, below, weights[0]
    )

    exact = exact_pass(weights, biases, relus, inputs, output_grads)
    for feature in repeats.features:  # the first row of an id has the gradient of all of its rows
        columns = slice(below + feature * width, below + (feature + 1) * width)
        _, first, inverse = np.unique(ids[feature], return_index=True, return_inverse=True)
        sums = np.zeros((rows, width))
        np.add.at(sums, first[inverse], exact[1][:, columns])
        exact[1][:, columns] = sums
    for found, expected in zip((outputs, *grads), exact, strict=True):
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5 * max(1.0, np.abs(expected).max()))


def test_ids_repeat_often_enough_or_are_left_alone():
    few, all_different = np.arange(100) % 7, np.arange(100)
    assert _native.find_repeats([all_different], 16) is None
    assert (
        _native.find_repeats([few], 4) is None
    )  # so short a vector is multiplied faster than it is looked up
    assert _native.find_repeats([all_different, few, None], 16).features == [1]
    with pytest.raises(ValueError, match="an id for each row"):
        _native.find_repeats([few, few[:5]], 16)


def test_repeats_of_other_rows_or_columns_are_refused():
    packed = _native.PackedMlp([20, 2], [True], trains=True)
    packed.pack([np.zeros((2, 20), np.float32)], [np.zeros(2, np.float32)])
    repeats = _native.find_repeats([np.zeros(9, np.int64)], 16)
    inputs, outputs, hidden = (
        np.zeros((9, 20), np.float32),
        np.zeros((9, 2), np.float32),
        np.zeros(0, np.float32),
    )
    with pytest.raises(ValueError, match="repeats are those of 9 rows, got 8"):
        packed.forward(inputs[:8], outputs[:8], hidden, repeats, 0)
    with pytest.raises(ValueError, match="beyond the inputs"):
        packed.forward(inputs, outputs, hidden, repeats, 5)


def test_the_norm_of_columns_of_a_larger_gradient():
    values = np.random.default_rng(0).normal(size=(50, 90)).astype(np.float32)
    assert _native.norm(values[:, 7:80]) == pytest.approx(np.linalg.norm(values[:, 7:80]), rel=1e-5)
    values[3, 79] = np.nan
    assert np.isnan(_native.norm(values[:, 7:80]))


@pytest.mark.parametrize("target", _native.dense_targets())
def test_an_activation_that_is_not_a_number_stays_visible(target):
    packed = _native.PackedMlp([1, 3], [True], trains=False, target=target)
    packed.pack([np.ones((3, 1), np.float32)], [np.array([np.nan, -1.0, 2.0], np.float32)])
    outputs = np.zeros((1, 3), np.float32)
    packed.forward(np.array([[0.5]], np.float32), outputs)
    np.testing.assert_array_equal(outputs, np.array([[np.nan, 0.0, 2.5]], np.float32))


def test_shapes_that_do_not_fit_are_refused():
    packed = _native.PackedMlp([3, 2], [True], trains=False)
    floats = np.zeros((4, 3), np.float32)
    with pytest.raises(ValueError, match=r"weights must be \[2, 3\], got \[4, 3\]"):
        packed.pack([floats], [np.zeros(2, np.float32)])
    with pytest.raises(ValueError, match=r"outputs must be \[4, 2\], got \[4, 3\]"):
        packed.forward(floats, floats)
    with pytest.raises(ValueError, match="packed for forward passes only"):
        packed.backward(
            floats, floats[:0, 0], floats[:, :2].copy(), floats[:, :2].copy(), [floats[:2]], [floats[0, :2]]
        )
    with pytest.raises(ValueError, match="one size more"):
        _native.PackedMlp([3, 2], [], trains=False)


def test_recmill_simd_caps_the_instructions():
    program = "from recmill import _native; print(_native.dense_target())"

    def run(most):
        return subprocess.run(
            [sys.executable, "-c", program], env={"RECMILL_SIMD": most}, capture_output=True, text=True
        )

    assert run("plain").stdout.strip() == "plain"
    assert run("").stdout.strip() == _native.dense_targets()[0]
    assert 'RECMILL_SIMD: no dense kernels are called "sse9"; there are:' in run("sse9").stderr
