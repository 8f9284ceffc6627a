"""Small fully connected networks for tabular data, which standardise their inputs themselves."""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

ACTIVATIONS: dict[str, type[nn.Module]] = {"tanh": nn.Tanh, "relu": nn.ReLU, "gelu": nn.GELU, "silu": nn.SiLU}


class Standardisation(nn.Module):
    """Module that maps x to (x − mean) / scale per column; constant columns have scale 1."""

    mean: Tensor
    scale: Tensor

    def __init__(self, columns: Tensor) -> None:
        super().__init__()
        spread = columns.std(0, correction=0)
        constant = spread <= 10 * torch.finfo(columns.dtype).eps * columns.abs().amax(0)
        self.register_buffer("mean", columns.mean(0))
        self.register_buffer("scale", spread.masked_fill(constant, 1.0))

    def forward(self, x: Tensor) -> Tensor:
        """Return the standardised columns of x."""
        return (x - self.mean) / self.scale


class Scaled(nn.Module):
    """Module that multiplies by a number."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        """Return x times the factor."""
        return x * self.factor


def mlp(
    inputs: Tensor,
    hidden: Sequence[int],
    num_outputs: int,
    activation: type[nn.Module],
    generator: torch.Generator,
    scaled: bool = False,
) -> nn.Sequential:
    """Return a fully connected network that standardises its inputs, with weights N(0, 1/fan-in) and zero biases.

    Args:
        inputs: the training inputs (n, n_features), which determine the standardisation and the dtype.
        hidden: widths of the hidden layers.
        num_outputs: the number of outputs.
        activation: the activation between layers.
        generator: the source of the weights.
        scaled: whether weights are N(0, 1), and the inputs of each layer divided by √fan-in. It is the same network,
            but a prior N(0, λ⁻¹I) of the weights then suits layers of all widths.
    """
    layers: list[nn.Module] = [Standardisation(inputs)]
    widths = [inputs.shape[1], *hidden, num_outputs]
    for fan_in, fan_out in pairwise(widths):
        # The default initialisation would draw from the global random state.
        linear = nn.utils.skip_init(nn.Linear, fan_in, fan_out, dtype=inputs.dtype, device=inputs.device)
        nn.init.normal_(linear.weight, std=1.0 if scaled else fan_in**-0.5, generator=generator)
        nn.init.zeros_(linear.bias)
        layers += [Scaled(fan_in**-0.5)] if scaled else []
        layers += [linear, activation()]
    return nn.Sequential(*layers[:-1])
