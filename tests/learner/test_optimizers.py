"""Learning rates over a run, and LAMB by hand."""

from __future__ import annotations

import pytest
import torch

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
    optimizer = Lamb([weights], lr=0.1, eps=0.0)
    weights.grad = torch.tensor([2.0, -0.5])
    optimizer.step()
    # After one step the corrected update is the sign of the gradient, so its length is sqrt(2); |w| = 5.
    expected = torch.tensor([3.0, 4.0]) - 0.1 * 5 / 2**0.5 * torch.tensor([1.0, -1.0])
    torch.testing.assert_close(weights.data, expected)


@pytest.mark.parametrize("name", ["sgd", "adagrad", "adam", "adamw", "lamb"])
def test_every_dense_optimizer_finds_a_minimum(name):
    weights = torch.nn.Parameter(torch.tensor([2.0, -3.0]))
    optimizer = dense_optimizer(Optimizer(name, 0.5 if name == "adagrad" else 0.05), [weights])
    for _ in range(300):
        optimizer.zero_grad()
        (weights - 1).square().sum().backward()
        optimizer.step()
    assert (weights - 1).abs().max() < 0.2
