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
        d, dtype, device = inputs.shape[1], inputs.dtype, inputs.device
        self.standardisation = Standardisation(inputs)
        joint = _student_directions(_JOINT_DIRECTIONS, d, generator)
        alone = _student_directions(_SINGLE_DIRECTIONS * d, 1, generator)
        single = alone * torch.eye(d, dtype=alone.dtype, device="cpu").repeat(_SINGLE_DIRECTIONS, 1)
        self.register_buffer("length_scales", torch.ones(d, dtype=dtype, device=device))
        self.register_buffer("joint_directions", joint.to(inputs))
        self.register_buffer("single_directions", single.to(inputs))
        self.change = nn.Parameter(torch.zeros(d, dtype=dtype, device=device))
        self.joint = nn.utils.skip_init(nn.Linear, 2 * len(joint), num_outputs, dtype=dtype, device=device)
        self.single = nn.utils.skip_init(
            nn.Linear, 2 * len(single), num_outputs, bias=False, dtype=dtype, device=device
        )
        for parameter in (self.joint.weight, self.joint.bias, self.single.weight):
            nn.init.zeros_(parameter)

    def features(self, x: Tensor, length_scales: Tensor, change: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return φ(A z) and φ(B z) for given length scales and δ: (…, 2 · number of directions) each. None: δ = 0."""
        z = self.standardisation(x) / length_scales
        z = z if change is None else z + z * change  # the Jacobian has a rule for this product
        return _waves(z, self.joint_directions), _waves(z, self.single_directions)

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs: (…, num_outputs)."""
        joint, single = self.features(x, self.length_scales, self.change)
        outputs: Tensor = self.joint(joint) + self.single(single)
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
