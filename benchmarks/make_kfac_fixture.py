"""Compute the KFAC of a small network with curvlinops, as a reference for the unit tests.

Run ``python benchmarks/make_kfac_fixture.py``. The network is ``fixture_network()``, in float64::

    Conv2d(2, 3, kernel_size=3, padding=1), ReLU, MaxPool2d(2), Flatten,
    Linear(27, 5), Tanh, Linear(5, 3)

with 12 random inputs of shape (2, 6, 6), 3 classes and the cross entropy summed over the data. The fixture,
tests/fixtures/kfac_curvlinops.safetensors, holds ``model.<parameter>``, ``inputs``, ``targets`` and
``block.<parameter>``: the dense KFAC block of each parameter, flattened in row-major order, **summed** over the
data, exact over the output directions (type-2), expand setting, weight and bias apart. The script checks on the way
that the biases of the linear layers have their exact GGN blocks.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.func import functional_call, jacrev

FIXTURE = Path(__file__).resolve().parent.parent / "tests" / "fixtures" / "kfac_curvlinops.safetensors"
NUM_INPUTS = 12
NUM_CLASSES = 3


def fixture_network() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(2, 3, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(27, 5),
        nn.Tanh(),
        nn.Linear(5, NUM_CLASSES),
    ).double()


def kfac_blocks(network: nn.Module, inputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
    """The diagonal blocks of curvlinops' KFAC, one for each parameter."""
    from curvlinops import FisherType, KFACLinearOperator, KFACType

    operator = KFACLinearOperator(
        network,
        nn.CrossEntropyLoss(reduction="sum"),
        list(network.parameters()),
        [(inputs, targets)],
        fisher_type=FisherType.TYPE2,
        kfac_approx=KFACType.EXPAND,
        separate_weight_and_bias=True,
    )
    num_parameters = sum(parameter.numel() for parameter in network.parameters())
    matrix = operator @ torch.eye(num_parameters, dtype=inputs.dtype)
    blocks = {}
    start = 0
    for name, parameter in network.named_parameters():
        end = start + parameter.numel()
        blocks[name] = matrix[start:end, start:end].contiguous()
        start = end
    return blocks


def ggn_block(network: nn.Module, inputs: Tensor, name: str) -> Tensor:
    """The exact GGN block Σ JᵀHJ of one parameter, by brute force."""
    parameter = network.get_parameter(name).detach()
    J = jacrev(lambda value: functional_call(network, {name: value}, inputs))(parameter).flatten(2)
    probabilities = torch.softmax(network(inputs), dim=1).detach()
    H = torch.diag_embed(probabilities) - probabilities[:, :, None] * probabilities[:, None, :]
    return torch.einsum("ncp,ncd,ndq->pq", J, H, J)


def main() -> None:
    torch.manual_seed(0)
    network = fixture_network()
    inputs = torch.randn(NUM_INPUTS, 2, 6, 6, dtype=torch.float64)
    targets = torch.randint(NUM_CLASSES, (NUM_INPUTS,))
    blocks = kfac_blocks(network, inputs, targets)
    for name in ("4.bias", "6.bias"):
        torch.testing.assert_close(blocks[name], ggn_block(network, inputs, name))
    tensors = {"inputs": inputs, "targets": targets}
    tensors |= {f"model.{name}": value.detach() for name, value in network.named_parameters()}
    tensors |= {f"block.{name}": block for name, block in blocks.items()}
    FIXTURE.parent.mkdir(parents=True, exist_ok=True)
    save_file(tensors, FIXTURE)
    print(f"{FIXTURE.name}: {FIXTURE.stat().st_size / 1024:.0f} kB", file=sys.stderr)


if __name__ == "__main__":
    main()
