"""A ranker, towers and a loss of one's own, as docs/models.md has them."""

import torch
from torch import nn
from torch.nn import functional


class Gated(nn.Module):
    """Each embedding counts by a gate that all features open."""

    def __init__(self, spec, num_numbers, num_embedded):
        super().__init__()
        width = num_numbers + num_embedded * spec.embedding_dim
        self.gates = nn.Linear(width, num_embedded)
        self.hidden = nn.Linear(width, spec.hidden[-1])
        self.output = nn.Linear(spec.hidden[-1], 1)

    def forward(self, numbers, pooled):
        gates = torch.sigmoid(self.gates(torch.cat([numbers, pooled.flatten(1)], dim=1)))
        inputs = torch.cat([numbers, (pooled * gates.unsqueeze(2)).flatten(1)], dim=1)
        return self.output(functional.relu(self.hidden(inputs))).squeeze(1)


class Narrow(nn.Module):
    """A tower of one layer."""

    def __init__(self, spec, num_numbers, num_embedded):
        super().__init__()
        self.layer = nn.Linear(num_numbers + num_embedded * spec.embedding_dim, spec.vector_size)

    def forward(self, numbers, pooled):
        return self.layer(torch.cat([numbers, pooled.flatten(1)], dim=1))


def focal(logits, labels):
    """Rows that are predicted well count less."""
    losses = functional.binary_cross_entropy_with_logits(logits, labels, reduction="none")
    return losses * (1 - torch.exp(-losses))
