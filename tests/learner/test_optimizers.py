"""Learning rates over a run, and LAMB by hand."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from recmill.learner.base import norm_of_rows
from recmill.learner.optimizers import Lamb, dense_optimizer, rate_factor
from recmill.recipe.recipe import Optimizer, Schedule


def test_warm_up_hold_and_quadratic_decay():
    schedule = Schedule(warmup=0.1, decay_from=0.6, decay="polynomial", power=2.0)
    found = [rate_factor(schedule, done) for done in (0.0, 0.05, 0.1, 0.4, 0.6, 0.8, 1.0)]
    assert found == pytest.approx([0.0, 0.5, 1.0, 1.0, 1.0, 0.25, 0.0])


def test_cosine_decay_ends_at_zero():
    schedule = Schedule(decay_from=0.0, decay="cosine")
    assert [rate_factor(schedule, done) for done in (0.0, 0.5, 1.0)] == pytest.approx([1.0, 0.5, 0.0])


def test_without_a_schedule_the_rate_stays():
    assert {rate_factor(Schedule(), done / 10) for done in range(11)} == {1.0}


def test_the_first_lamb_step_has_the_length_of_the_weights_times_the_rate():
    weights = torch.nn.Parameter(torch.tensor([3.0, 4.0]))
    optimizer = Lamb(Optimizer("lamb", 0.1, eps=1e-12), [weights])
    weights.grad = torch.tensor([2.0, -0.5])
    optimizer.step(0.1)
    # After one step the corrected update is the sign of the gradient, so its length is sqrt(2); |w| = 5.
    expected = torch.tensor([3.0, 4.0]) - 0.1 * 5 / 2**0.5 * torch.tensor([1.0, -1.0])
    torch.testing.assert_close(weights.data, expected)


@pytest.mark.parametrize("name", ["sgd", "adagrad", "adam", "adamw", "lamb"])
def test_every_dense_optimizer_finds_a_minimum(name):
    weights = torch.nn.Parameter(torch.tensor([2.0, -3.0]))
    rate = 0.5 if name == "adagrad" else 0.05
    optimizer = dense_optimizer(Optimizer(name, rate), [weights])
    for _ in range(300):
        weights.grad = None
        (weights - 1).square().sum().backward()
        optimizer.step(rate)
    assert (weights - 1).abs().max() < 0.2


@pytest.mark.parametrize("name", ["sgd", "adagrad", "adam", "adamw"])
def test_steps_and_state_are_those_of_torch_to_the_bit(name):
    draw = torch.Generator().manual_seed(0)
    ours = [torch.nn.Parameter(torch.randn(size, generator=draw)) for size in ((7, 5), (5,))]
    its = [torch.nn.Parameter(weights.detach().clone()) for weights in ours]
    spec = Optimizer(name, 0.1, eps=1e-6, weight_decay=0.01)
    make = {"sgd": "SGD", "adagrad": "Adagrad", "adam": "Adam", "adamw": "AdamW"}[name]
    given = {} if name == "sgd" else {"eps": 1e-6}
    optimizer = dense_optimizer(spec, ours)
    expected = getattr(torch.optim, make)(its, lr=0.1, weight_decay=0.01, fused=True, **given)
    for rate in (0.1, 0.1, 0.05):
        for mine, other in zip(ours, its, strict=True):
            mine.grad = torch.randn(mine.shape, generator=draw)
            other.grad = mine.grad.clone()
        expected.param_groups[0]["lr"] = rate
        expected.step()
        optimizer.step(rate)
    for mine, other in zip(ours, its, strict=True):
        assert torch.equal(mine, other)
        state = {slot: value for slot, value in expected.state[other].items() if value is not None}
        assert optimizer.state[mine].keys() == state.keys()
        assert all(torch.equal(optimizer.state[mine][slot], value) for slot, value in state.items())


def test_training_does_not_import_the_compiler():
    code = (
        "import sys, torch; from recmill.learner import optimizers as o; from recmill.recipe.recipe import Optimizer; "
        "w = torch.nn.Parameter(torch.ones(2)); w.grad = torch.ones(2); "
        "o.dense_optimizer(Optimizer('adam', 0.1), [w]).step(0.1); sys.exit('torch._dynamo' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_norm_of_rows_takes_gradients_of_any_layout():
    of_a_sum = torch.randn(8, 1, 1).expand(8, 26, 1)
    columns = torch.randn(8, 40)[:, 3:19].view(8, 4, 4)
    for gradient in (of_a_sum, columns, torch.randn(5, 2), torch.empty(0, 3, 4), torch.empty(0, 4)):
        assert norm_of_rows(gradient) == pytest.approx(float(gradient.norm()), rel=1e-5)
