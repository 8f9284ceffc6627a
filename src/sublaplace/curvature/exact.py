"""The exact GGN, for models where it fits into memory."""

from dataclasses import dataclass, field, replace
from itertools import accumulate

import torch
from torch import Tensor

from sublaplace.curvature.exact_precision import DensePrecision, DualPrecision
from sublaplace.curvature.stream import CurvatureStream
from sublaplace.jacobians.blocks import OuterBlock
from sublaplace.jacobians.jacobian import Jacobian
from sublaplace.model.linalg import mirrored
from sublaplace.model.parameters import ParameterLayout
from sublaplace.runtime.distributed import ranks_of

_PANEL = 1024  # columns of the GGN that are updated at once
_WIDE = 32  # fewest inputs of a layer for which its outer products are used


@dataclass(frozen=True)
class _DenseSum:
    """The sum Σ VᵀV, of which at least the lower triangle is filled, at half the cost of the full matrix.

    If a layer is applied once per input, its K rows are outer products g aᵀ. Its product with all rows v is then
    Σ_n a_n ⊗ (Σ_k g_nk v_nk), which is K times cheaper than a dense product. Other parameters are added panel by panel.
    """

    layout: ParameterLayout
    ggn: Tensor  # (p, p)

    def add(self, jacobian: Jacobian) -> None:
        rows = jacobian.dense_rows().double()
        plain = stop = 0  # `plain`: start of the parameters that are not added yet
        for name, size in self.layout.sizes.items():
            start, stop = stop, stop + size
            block = jacobian.blocks.get(name)
            if jacobian.num_rows > 1 and isinstance(block, OuterBlock) and block.is_single and block.fan_in >= _WIDE:
                self._add_panels(rows, plain, start)
                self._add_outer(rows.unflatten(0, (-1, jacobian.num_rows)), block, start)
                plain = stop
        self._add_panels(rows, plain, stop)

    def _add_panels(self, rows: Tensor, first: int, last: int) -> None:
        for start, stop in _panels(first, last):
            self.ggn[start:stop, :stop].addmm_(rows[:, start:stop].T, rows[:, :stop])

    def _add_outer(self, rows: Tensor, block: OuterBlock, start: int) -> None:
        """Add the products of one layer with all rows (n, K, p), a few of its outputs at a time."""
        a, g = block.inputs[:, 0, :, 0].double(), block.gradients[:, :, 0, :, 0].double()  # (n, I), (n, K, O)
        (I, O), step = (block.fan_in, block.fan_out), rows.shape[1]
        for first in range(0, O, step):
            last = min(first + step, O)
            stop = start + I * (O if block.transposed else last)
            weighted = g[:, :, first:last].transpose(1, 2) @ rows[:, :, :stop]
            for output in range(first, last):
                places = (
                    slice(start + output, stop, O)
                    if block.transposed
                    else slice(start + output * I, start + (output + 1) * I)
                )
                self.ggn[places, :stop].addmm_(a.T, weighted[:, output - first])

    def tensors(self) -> dict[str, Tensor]:
        return {"ggn": self.ggn}

    def restore(self, tensors: dict[str, Tensor]) -> None:
        self.ggn.copy_(tensors["ggn"])


def _panels(first: int, last: int) -> list[tuple[int, int]]:
    return [(start, min(start + _PANEL, last)) for start in range(first, last, _PANEL)]


@dataclass(frozen=True)
class _Rows:
    num_parameters: int
    device: torch.device
    parts: list[Tensor] = field(default_factory=list)

    def add(self, jacobian: Jacobian) -> None:
        self.parts.append(jacobian.dense_rows().double())

    def joined(self) -> Tensor:
        """Return all rows; each part is freed once it is copied, so that the rows are not held twice."""
        count = sum(map(len, self.parts))
        joined = torch.empty(count, self.num_parameters, dtype=torch.float64, device=self.device)
        for start in accumulate([0, *map(len, self.parts[:-1])]) if self.parts else ():
            part = self.parts.pop(0)
            joined[start : start + len(part)] = part
        self.parts.append(joined)
        return joined

    def tensors(self) -> dict[str, Tensor]:
        return {"rows": self.joined()}

    def restore(self, tensors: dict[str, Tensor]) -> None:
        self.parts[:] = [tensors["rows"]]


def exact_ggn(stream: CurvatureStream, num_rows: int, prior_precision: float) -> DensePrecision | DualPrecision:
    """Return Λ = Σ_i J_iᵀ H_i J_i + λI in float64, as a p × p matrix, or by its rows if there are fewer than p.

    Cost: num_rows·min(p, num_rows)·p; a p × p matrix costs less if layers are applied once per input. Memory: see
    `exact_bytes`.

    Args:
        stream: the training data.
        num_rows: the number of Jacobian rows, N·C.
        prior_precision: λ.
    """
    layout = stream.linearization.layout
    p = layout.num_parameters
    device = stream.linearization.device
    if num_rows < p:
        rows = _Rows(p, device)
        stream.accumulate("exact GGN rows", rows, over_ranks=False)
        joined = ranks_of(stream.loader).joined_rows(rows.joined())
        return DualPrecision(layout, joined.mul_(stream.scale**0.5), prior_precision, stream.scale)
    dense = _DenseSum(layout, torch.zeros(p, p, dtype=torch.float64, device=device))
    replace(stream, num_vectors=p).accumulate("exact GGN", dense)
    return DensePrecision(layout, mirrored(dense.ggn).mul_(stream.scale), prior_precision, stream.scale)


def exact_bytes(num_parameters: int, num_rows: int, num_ranks: int = 1) -> int:
    """Return the peak memory of `exact_ggn` and one Cholesky factor, in bytes, without the chunks of the pass.

    Ranks that send each other their rows hold them as sent, as received and joined.
    """
    if num_rows < num_parameters:
        copies = 1 if num_ranks == 1 else 4
        return 8 * (copies * num_rows * num_parameters + 3 * num_rows**2)
    return 8 * 4 * num_parameters**2
