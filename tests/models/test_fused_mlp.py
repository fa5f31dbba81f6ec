"""The fused layers give what torch's own give, forward and backward."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from recmill import _native
from recmill.models.layers import MLP


@pytest.mark.parametrize("rows", [1, 3, 64])
@pytest.mark.parametrize("last_relu", [True, False])
@pytest.mark.parametrize("wants_input_grad", [True, False])
def test_fused_layers_equal_torchs(rows, last_relu, wants_input_grad):
    torch.manual_seed(rows)
    layers = MLP([5, 17, 9, 2], last_relu)
    inputs = torch.randn(rows, 5, requires_grad=wants_input_grad)
    weights = [*layers.parameters(), *([inputs] if wants_input_grad else [])]
    found = []
    for fused in (True, False):
        layers._can_be_fused = lambda _, fused=fused: fused
        outputs = layers(inputs)
        found.append([outputs.detach(), *torch.autograd.grad(outputs.square().sum(), weights)])
    for ours, torchs in zip(*found, strict=True):
        torch.testing.assert_close(ours, torchs, rtol=1e-5, atol=1e-6)


def test_a_gradient_that_is_a_view_is_left_as_it_is():
    layers = MLP([4, 4], last_relu=True)
    inputs = torch.randn(6, 4)
    outputs = torch.cat([layers(inputs), torch.randn(6, 3)], dim=1)
    outputs.retain_grad()
    (outputs * torch.arange(7.0)).sum().backward()
    torch.testing.assert_close(outputs.grad, torch.arange(7.0).expand(6, 7))


def test_training_is_fused_and_the_other_ways_are_not():
    layers, inputs = MLP([4, 4], last_relu=True, dropout=0.5), torch.randn(2, 4)
    assert layers.eval()._can_be_fused(inputs)
    assert not layers.train()._can_be_fused(inputs)
    layers.eval()
    assert not layers._can_be_fused(inputs.double())
    with torch.no_grad():
        assert not layers._can_be_fused(inputs)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert not layers._can_be_fused(inputs)


def test_an_activation_that_is_not_a_number_stays_visible():
    values = np.array([[np.nan, -1.0, 2.0]], np.float32)
    _native.bias_relu(values, np.array([0.0, 0.5, 0.5], np.float32), True)
    np.testing.assert_array_equal(values, np.array([[np.nan, 0.0, 2.5]], np.float32))


def test_shapes_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="one value for each column"):
        _native.bias_relu(np.zeros((2, 3), np.float32), np.zeros(2, np.float32), True)
    with pytest.raises(ValueError, match="differ in shape"):
        _native.bias_relu_backward(
            np.zeros((2, 3), np.float32), np.zeros((1, 3), np.float32), np.zeros(3, np.float32), True
        )
