"""Networks of sines and cosines for few data."""

import torch
from torch import Tensor, nn

from sublaplace.model.mlp import Standardisation

_JOINT_DIRECTIONS = 256
_SINGLE_DIRECTIONS = 16  # per input
_DEGREES_OF_FREEDOM = 5


class FourierNetwork(nn.Module):
    r"""Network with one hidden layer of sines and cosines of the inputs, divided by one length scale each.

    With standardised inputs x and length scales ℓ, let z = x (1 + δ) / ℓ. The output is

    .. math:: W_1 φ(A z) + W_2 φ(B z) + b, \quad φ(a) = [\sin a, \cos a] / \sqrt{\text{number of directions}}.

    The directions A and B and the length scales ℓ are fixed; the weights W, b and δ are trained. Rows of A come from
    Student's t distribution with five degrees of freedom, so that under a prior of W_1 the functions are those of a
    Matérn kernel of order 5/2. Every row of B has a single nonzero entry: W_2 φ(B z) is a sum of functions of one input
    each. The parameters are zero at first.

    Args:
        inputs: the training inputs (n, d), which determine the standardisation, the dtype and the device.
        num_outputs: the number of outputs.
        generator: the source of the directions, on the CPU.
    """

    length_scales: Tensor
    joint_directions: Tensor
    single_directions: Tensor

    def __init__(self, inputs: Tensor, num_outputs: int, generator: torch.Generator) -> None:
        super().__init__()
        d, like = inputs.shape[1], {"dtype": inputs.dtype, "device": inputs.device}
        self.standardisation = Standardisation(inputs)
        joint = _student_directions(_JOINT_DIRECTIONS, d, generator)
        alone = _student_directions(_SINGLE_DIRECTIONS * d, 1, generator)
        single = alone * torch.eye(d, dtype=alone.dtype, device="cpu").repeat(_SINGLE_DIRECTIONS, 1)
        self.register_buffer("length_scales", torch.ones(d, **like))
        self.register_buffer("joint_directions", joint.to(**like))
        self.register_buffer("single_directions", single.to(**like))
        self.change = nn.Parameter(torch.zeros(d, **like))
        self.joint = nn.utils.skip_init(nn.Linear, 2 * len(joint), num_outputs, **like)
        self.single = nn.utils.skip_init(nn.Linear, 2 * len(single), num_outputs, bias=False, **like)
        for parameter in (self.joint.weight, self.joint.bias, self.single.weight):
            nn.init.zeros_(parameter)

    def features(self, x: Tensor, length_scales: Tensor) -> tuple[Tensor, Tensor]:
        """Return φ(A z) and φ(B z) for other length scales and δ = 0: (…, 2 · number of directions) each."""
        z = self.standardisation(x) / length_scales
        return _waves(z, self.joint_directions), _waves(z, self.single_directions)

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs: (…, num_outputs)."""
        z = self.standardisation(x) / self.length_scales
        z = z + z * self.change  # the Jacobian has a rule for this product
        outputs: Tensor = self.joint(_waves(z, self.joint_directions)) + self.single(_waves(z, self.single_directions))
        return outputs


def _student_directions(count: int, dim: int, generator: torch.Generator) -> Tensor:
    """Return rows of Student's t distribution: normal ones over the root of a mean of squares, (count, dim)."""
    normal = torch.randn(count, dim, generator=generator, dtype=torch.float64, device="cpu")
    others = torch.randn(count, _DEGREES_OF_FREEDOM, generator=generator, dtype=torch.float64, device="cpu")
    return normal / others.square().mean(1, keepdim=True).sqrt()


def _waves(z: Tensor, directions: Tensor) -> Tensor:
    """Return sines and cosines, of which the squares sum to one."""
    angles = z @ directions.T
    return torch.cat([angles.sin(), angles.cos()], dim=-1) * len(directions) ** -0.5
