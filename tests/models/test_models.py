"""Models: shapes, hand-computed interactions, no leak between rows, and that they can learn a planted rule."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional

from recmill.learner.ranking import MODELS
from recmill.models.dlrm import DLRM
from recmill.models.fm import FM
from recmill.models.layers import CrossNetwork, DotInteraction
from recmill.models.lr import LogisticRegression
from recmill.models.two_tower import TwoTower, in_batch_softmax, pairwise_bce
from recmill.models.wide_deep import WideDeep
from recmill.recipe.recipe import Ranking, Retrieval


def ranking(**keys) -> Ranking:
    return Ranking(
        **{"model": "dlrm", "label": "click", "embedding_dim": 4, "bottom": (8, 4), "top": (8,), **keys}
    )


SPECS = {
    "dot": ranking(interaction="dot"),
    "cat": ranking(interaction="cat"),
    "cross": ranking(interaction="cross", cross_layers=2, cross_rank=3),
    "wide_deep": ranking(model="wide_deep", hidden=(16, 8), dropout=0.5),
    "fm": ranking(model="fm"),
    "deepfm": ranking(model="deepfm", hidden=(8,)),
    "dcn": ranking(model="dcn", hidden=(16,), cross_layers=2),
    "dcn, low rank": ranking(model="dcn", cross_layers=2, cross_rank=3),
    "masknet": ranking(model="masknet", hidden=(16,), mask_blocks=2, mask_width=16),
}


def ranker(kind: str):
    torch.manual_seed(0)
    model = MODELS[SPECS[kind].model](SPECS[kind], 3, 5)
    return model, lambda numbers, pooled: model(numbers, pooled, pooled[:, :2, 0])


LEARNED = {
    "dot": 0.9,
    "cat": 0.65,
    "cross": 0.75,
    "wide_deep": 0.65,
    "deepfm": 0.7,
    "dcn": 0.85,
    "dcn, low rank": 0.75,
    "masknet": 0.75,
}


@pytest.mark.parametrize("kind", SPECS)
def test_a_row_scores_the_same_alone_and_in_a_batch(kind):
    model, score = ranker(kind)
    model.eval()
    numbers, pooled = torch.randn(9, 3), torch.randn(9, 5, 4)
    together = score(numbers, pooled)
    assert together.shape == (9,)
    alone = torch.cat([score(numbers[row : row + 1], pooled[row : row + 1]) for row in range(9)])
    torch.testing.assert_close(alone, together, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("kind", SPECS)
def test_every_parameter_and_input_gets_a_gradient(kind):
    model, score = ranker(kind)
    numbers, pooled = torch.randn(32, 3, requires_grad=True), torch.randn(32, 5, 4, requires_grad=True)
    score(numbers, pooled).square().sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().sum() > 0, name
    assert numbers.grad.abs().sum() > 0
    assert (pooled.grad.abs().sum(dim=(0, 2)) > 0).all()


@pytest.mark.parametrize("kind", LEARNED)
def test_a_planted_product_of_two_features_is_learned(kind):
    model, score = ranker(kind)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    torch.manual_seed(1)
    for _ in range(200):
        numbers, pooled = torch.randn(256, 3), torch.randn(256, 5, 4)
        labels = ((pooled[:, 0] * pooled[:, 1]).sum(1) + numbers[:, 0] > 0).float()
        loss = functional.binary_cross_entropy_with_logits(score(numbers, pooled), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.eval()
    numbers, pooled = torch.randn(4000, 3), torch.randn(4000, 5, 4)
    labels = (pooled[:, 0] * pooled[:, 1]).sum(1) + numbers[:, 0] > 0
    accuracy = ((score(numbers, pooled) > 0) == labels).float().mean()
    assert accuracy > LEARNED[kind]


def test_dot_interaction_is_the_strict_lower_triangle():
    vectors = torch.tensor([[[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]])
    assert DotInteraction(3)(vectors).tolist() == [[11.0, 17.0, 39.0]]


def test_one_cross_layer_is_x0_times_uvx_plus_b_plus_x():
    network = CrossNetwork(3, 1, 2)
    inputs = torch.randn(4, 3)
    expected = (
        inputs * (inputs @ network.down[0].weight.T @ network.up[0].weight.T + network.up[0].bias) + inputs
    )
    torch.testing.assert_close(network(inputs), expected)


def test_one_full_cross_layer_is_x0_times_wx_plus_b_plus_x():
    network = CrossNetwork(3, 1, None)
    inputs = torch.randn(4, 3)
    weight, bias = network.up[0].weight, network.up[0].bias
    torch.testing.assert_close(network(inputs), inputs * (inputs @ weight.T + bias) + inputs)


def test_a_factorization_machine_adds_up_the_products_of_all_pairs():
    model = FM(ranking(model="fm", embedding_dim=2), 1, 2)
    with torch.no_grad():
        model.linear.weights.copy_(torch.tensor([10.0]))
        model.linear.bias.fill_(100.0)
        model.pairs.of_numbers.copy_(torch.tensor([[1.0, 1.0]]))
    numbers, pooled = torch.tensor([[2.0]]), torch.tensor([[[1.0, 0.0], [3.0, 4.0]]])
    # Pairs: (2, 2)(1, 0) = 2, (2, 2)(3, 4) = 14, (1, 0)(3, 4) = 3; linear: 100 + 2 * 10; wide: 0.5.
    assert model(numbers, pooled, torch.tensor([[0.5]])).tolist() == [139.5]


def test_a_logistic_regression_adds_up_weights():
    model = LogisticRegression(ranking(model="lr", embedding_dim=1), 2, 2)
    with torch.no_grad():
        model.linear.weights.copy_(torch.tensor([1.0, 10.0]))
        model.linear.bias.fill_(100.0)
    pooled = torch.tensor([[[0.25], [0.5]]])
    assert model(torch.tensor([[2.0, 3.0]]), pooled).tolist() == [132.75]


def test_a_dlrm_may_have_no_numbers():
    assert DLRM(ranking(bottom=()), 0, 5)(torch.empty(7, 0), torch.randn(7, 5, 4)).shape == (7,)


def test_wide_weights_add_to_the_logit():
    model = WideDeep(ranking(model="wide_deep", hidden=(4,)), 2, 1).eval()
    numbers, pooled = torch.randn(3, 2), torch.randn(3, 1, 4)
    difference = model(numbers, pooled, torch.full((3, 2), 0.5)) - model(numbers, pooled, torch.zeros(3, 2))
    torch.testing.assert_close(difference, torch.ones(3))


def towers(**keys):
    torch.manual_seed(0)
    spec = Retrieval(
        **{"label": "click", "user": ("u",), "item": ("i",), "embedding_dim": 4, "hidden": (8, 6), **keys}
    )
    return TwoTower(spec, (1, 2), (0, 3))


@pytest.mark.parametrize(("hidden", "size"), [((8, 6), 6), ((), 4)])
def test_towers_give_unit_vectors(hidden, size):
    model = towers(hidden=hidden)
    users = model.user(torch.randn(5, 1), torch.randn(5, 2, 4))
    items = model.item(torch.empty(5, 0), torch.randn(5, 3, 4))
    assert users.shape == items.shape == (5, size)
    torch.testing.assert_close(users.norm(dim=1), torch.ones(5))


def test_a_tower_without_layers_adds_its_embeddings():
    pooled = torch.randn(5, 3, 4)
    expected = functional.normalize(pooled.sum(dim=1), dim=1)
    torch.testing.assert_close(towers(hidden=()).item(torch.empty(5, 0), pooled), expected)


def softmax(users, items, own, counts, temperature=1.0, log_q=None):
    return in_batch_softmax(users, items, torch.tensor(own), torch.tensor(counts), temperature, log_q).item()


def test_in_batch_softmax_of_two_rows_by_hand():
    users = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    items = torch.tensor([[1.0, 0.0], [0.6, 0.8]])
    first = -math.log(math.exp(2.0) / (math.exp(2.0) + math.exp(1.2)))
    second = -math.log(math.exp(1.6) / (math.exp(0.0) + math.exp(1.6)))
    assert softmax(users, items, [0, 1], [1.0, 1.0], temperature=0.5) == pytest.approx(first + second)


def test_the_same_item_in_another_row_is_no_negative():
    users = torch.tensor([[1.0, 0.0], [1.0, 0.0]])
    assert softmax(users, torch.tensor([[1.0, 0.0]]), [0, 0], [2.0], temperature=0.1) == 0.0


def test_an_item_of_two_rows_is_two_negatives_for_a_third():
    found = softmax(torch.zeros(3, 2), torch.zeros(2, 2), [0, 1, 1], [1.0, 2.0])
    assert found == pytest.approx(math.log(3) + 2 * math.log(2))


def test_log_q_takes_off_the_popularity_of_negatives():
    users, items = torch.eye(2), torch.eye(2)
    plain = softmax(users, items, [0, 1], [1.0, 1.0])
    popular = softmax(users, items, [0, 1], [1.0, 1.0], log_q=torch.log(torch.tensor([0.1, 0.9])))
    assert popular != pytest.approx(plain)
    uniform = softmax(users, items, [0, 1], [1.0, 1.0], log_q=torch.log(torch.tensor([0.5, 0.5])))
    assert uniform == pytest.approx(plain)


def test_pairwise_bce_is_low_when_cosines_agree_with_clicks():
    users = functional.normalize(torch.randn(6, 4), dim=1)
    labels = torch.tensor([1.0, 0.0, 1.0, 0.0, 1.0, 0.0])
    items = users * (2 * labels[:, None] - 1)
    rows, bias = torch.arange(6), torch.zeros(())
    right, wrong = (pairwise_bce(users, items, rows, truth, bias, 0.1) for truth in (labels, 1 - labels))
    assert right < 0.01 < wrong
