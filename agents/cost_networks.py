"""Small networks fitted to what every action costs, and several of them as one policy.

Legend: n visits, F features, A actions.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
from collections.abc import Sequence

import numpy as np
import torch
from torch import nn

from specgym.agents.sb3_settings import FitConfig

Layers = tuple[tuple[np.ndarray, np.ndarray], ...]
FORBIDDEN = -1e9  # a score that is never the largest


@dataclasses.dataclass(frozen=True, eq=False)
class Costs:
    """What a network is fitted to.

    Attributes:
        inputs: Standardised observations, float32 [n, F].
        costs: Cost of each action over the best allowed one's, float32 [n, A]; infinite where it is
            not allowed.
    """

    inputs: np.ndarray
    costs: np.ndarray

    def at(self, rows: np.ndarray) -> Costs:
        """These visits alone."""
        return Costs(self.inputs[rows], self.costs[rows])


def fit_network(train: Costs, judge: Costs, config: FitConfig, seed: int) -> Layers:
    """The layers of a network, at the pass at which its best actions cost least on ``judge``."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = make_network(train.inputs.shape[1], train.costs.shape[1], config)
        optimizer = torch.optim.AdamW(
            network.parameters(), lr=config.learning_rate, weight_decay=config.weight_decay
        )
        best, lowest, num_worse = copy.deepcopy(network), np.inf, 0
        for _ in range(config.num_epochs):
            run_epoch(network, optimizer, train, config)
            cost = judged_cost(network, judge)
            if cost < lowest:
                best, lowest, num_worse = copy.deepcopy(network), cost, 0
            else:
                num_worse += 1
            if num_worse == config.patience:
                break
    linear = [layer for layer in best if isinstance(layer, nn.Linear)]
    return tuple(
        (layer.weight.detach().numpy().copy(), layer.bias.detach().numpy().copy())
        for layer in linear
    )


def make_network(num_inputs: int, num_actions: int, config: FitConfig) -> nn.Sequential:
    """A network of tanh layers; its scores start at zero."""
    sizes = (num_inputs, *config.hidden_sizes)
    layers: list[nn.Module] = [nn.Dropout(config.dropout)]
    for inputs, outputs in itertools.pairwise(sizes):
        layers += [nn.Linear(inputs, outputs), nn.Tanh()]
    last = nn.Linear(sizes[-1], num_actions)
    nn.init.zeros_(last.weight)
    nn.init.zeros_(last.bias)
    return nn.Sequential(*layers, last)


def run_epoch(
    network: nn.Sequential, optimizer: torch.optim.Optimizer, train: Costs, config: FitConfig
) -> None:
    """One pass over the visits in random order."""
    network.train()
    order = torch.randperm(len(train.inputs))
    inputs, costs = torch.from_numpy(train.inputs), torch.from_numpy(train.costs)
    for rows in order.split(config.batch_size):
        loss = loss_of(network(inputs[rows]), costs[rows], config)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def loss_of(scores: torch.Tensor, costs: torch.Tensor, config: FitConfig) -> torch.Tensor:
    """The loss of scores [b, A] against costs [b, A], actions that are not allowed left out."""
    allowed = torch.isfinite(costs)
    finite = costs.masked_fill(~allowed, 0.0)
    if config.loss == "values":
        count = allowed.sum(1, keepdim=True)
        centred = finite - finite.sum(1, keepdim=True) / count
        errors = nn.functional.smooth_l1_loss(-scores, centred, reduction="none")
        return errors[allowed].mean()
    log_share = torch.log_softmax(scores.masked_fill(~allowed, FORBIDDEN), dim=1)
    share = log_share.exp()
    entropy = -(share * log_share).sum(1)
    return ((share * finite).sum(1) - config.entropy * entropy).mean()


@torch.no_grad()
def judged_cost(network: nn.Sequential, judge: Costs) -> float:
    """Mean cost of the actions of largest score."""
    network.eval()
    scores = network(torch.from_numpy(judge.inputs)).numpy()
    chosen = np.where(np.isfinite(judge.costs), scores, -np.inf).argmax(axis=1)
    return float(judge.costs[np.arange(len(chosen)), chosen].mean())


def add_networks(networks: Sequence[Layers]) -> Layers:
    """One network whose scores are the mean of several ones' with the same inputs."""
    first, *middles, last = zip(*networks, strict=True)
    joined = [(np.concatenate([w for w, _ in first]), np.concatenate([b for _, b in first]))]
    joined += [
        (block_diagonal([w for w, _ in layers]), np.concatenate([b for _, b in layers]))
        for layers in middles
    ]
    weight = np.concatenate([w for w, _ in last], axis=1) / len(networks)
    return (*joined, (weight, np.mean([b for _, b in last], axis=0)))


def block_diagonal(blocks: Sequence[np.ndarray]) -> np.ndarray:
    """Matrices along the diagonal of one that is zero elsewhere."""
    rows, columns = (sum(block.shape[axis] for block in blocks) for axis in (0, 1))
    matrix = np.zeros((rows, columns), dtype=np.float32)
    row = column = 0
    for block in blocks:
        matrix[row : row + block.shape[0], column : column + block.shape[1]] = block
        row, column = row + block.shape[0], column + block.shape[1]
    return matrix
