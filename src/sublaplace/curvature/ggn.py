"""The exact GGN, where it fits."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from sublaplace.curvature.stream import CurvatureStream
from sublaplace.distributed import ranks_of
from sublaplace.jacobians import Jacobian
from sublaplace.precision import DensePrecision, DualPrecision

_PANEL = 1024  # columns of the GGN that are added to at once


@dataclass(frozen=True)
class _DenseSum:
    """Σ VᵀV: its lower triangle, panel by panel, at half the cost of all; `whole` mirrors it."""

    ggn: Tensor  # (p, p)

    def add(self, jacobian: Jacobian) -> None:
        rows = jacobian.dense_rows().double()
        for start, stop in self._panels():
            self.ggn[start:stop, :stop].addmm_(rows[:, start:stop].T, rows[:, :stop])

    def whole(self) -> Tensor:
        for start, stop in self._panels():
            self.ggn[:start, start:stop] = self.ggn[start:stop, :start].T
        return self.ggn

    def _panels(self) -> list[tuple[int, int]]:
        p = len(self.ggn)
        return [(start, min(start + _PANEL, p)) for start in range(0, p, _PANEL)]

    def tensors(self) -> dict[str, Tensor]:
        return {"ggn": self.ggn}

    def restore(self, tensors: dict[str, Tensor]) -> None:
        self.ggn.copy_(tensors["ggn"])


@dataclass(frozen=True)
class _Rows:
    num_parameters: int
    device: torch.device
    parts: list[Tensor] = field(default_factory=list)

    def add(self, jacobian: Jacobian) -> None:
        self.parts.append(jacobian.dense_rows().double())

    def joined(self) -> Tensor:
        none = torch.zeros(0, self.num_parameters, dtype=torch.float64, device=self.device)
        return torch.cat([none, *self.parts])

    def tensors(self) -> dict[str, Tensor]:
        return {"rows": self.joined()}

    def restore(self, tensors: dict[str, Tensor]) -> None:
        self.parts[:] = [tensors["rows"]]


def exact_ggn(stream: CurvatureStream, num_rows: int, prior_precision: float) -> DensePrecision | DualPrecision:
    """Λ = Σ_i J_iᵀ H_i J_i + λI, dense in float64: as p × p, or as its `num_rows` rows (N·C) where these are fewer.

    Cost: num_rows·min(p, num_rows)·p; memory: see `exact_bytes`.
    """
    layout = stream.linearization.layout
    p = layout.num_parameters
    device = stream.linearization.device
    if num_rows < p:
        rows = _Rows(p, device)
        stream.accumulate("exact GGN rows", rows, over_ranks=False)
        joined = ranks_of(stream.loader).joined_rows(rows.joined())
        return DualPrecision(layout, joined, prior_precision).scaled(stream.scale)
    dense = _DenseSum(torch.zeros(p, p, dtype=torch.float64, device=device))
    with stream.linearization.beside(p):
        stream.accumulate("exact GGN", dense)
    return DensePrecision(layout, dense.whole().mul_(stream.scale), prior_precision, stream.scale)


def exact_bytes(num_parameters: int, num_rows: int) -> int:
    """Memory that `exact_ggn` and one Cholesky factor of it need at their peak."""
    smaller = min(num_parameters, num_rows)
    return 8 * (2 * smaller * num_parameters + 2 * smaller**2)
