"""The peers' side of the benchmark: laplace-torch with its backends, curvlinops alone, and the authors' way.

"Authors" is a re-write of the whole-batch procedure of the paper's code, not that code (which needs CUDA):
the Jacobian of a batch by one ``torch.func.jacrev`` with respect to a flat parameter vector, everything else
dense. Each batch size is about the fastest that ``sweep_batch_sizes.py`` found, so that peers are shown at their best:
where Jacobians come from ``jacrev`` of a batch, an input costs more the larger the batch (10 ms at one or two inputs,
more than 300 ms at 25), and a user who predicts in usual batches pays that.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from curvlinops import FisherType, KFACLinearOperator, KFACType
from laplace import Laplace
from laplace.baselaplace import ELLA, ParametricLaplace
from laplace.curvature import AsdlGGN, BackPackGGN, CurvatureInterface, CurvlinopsGGN
from laplace.utils.matrix import KronDecomposed
from protocol import NUM_FIT_INPUTS, NUM_SUBSPACE_INPUTS, PRIOR_PRECISION, SUBSPACE_DIMENSION, Setup
from torch import Tensor, nn
from torch.func import functional_call, jacrev
from torch.utils.data import DataLoader, TensorDataset

BACKENDS: dict[str, type[CurvatureInterface]] = {
    "curvlinops": CurvlinopsGGN,
    "asdl": AsdlGGN,
    "backpack": BackPackGGN,
}

BATCH_SIZES: dict[str, int] = {
    "laplace-torch/curvlinops/kfac-fit": 50,
    "laplace-torch/curvlinops/diagonal-fit": 2,
    "laplace-torch/curvlinops/kfac-prediction": 1,
    "laplace-torch/asdl/kfac-fit": 50,
    "laplace-torch/asdl/diagonal-fit": 50,
    "laplace-torch/asdl/kfac-prediction": 1,
    "laplace-torch/backpack/kfac-fit": 50,
    "laplace-torch/backpack/diagonal-fit": 50,
    "laplace-torch/backpack/kfac-prediction": 50,
    "laplace-torch/backpack/isotropic-projector-and-posterior": 50,
    "laplace-torch/full/last-layer-fit": 50,
    "laplace-torch/full/last-layer-prediction": 50,
    "laplace-torch/kfac/last-layer-fit": 50,
    "laplace-torch/kfac/last-layer-prediction": 50,
    "curvlinops/kfac-factors": 50,
    "authors/projector-and-posterior": 1,
    "authors/projector-and-posterior-with-kfac": 1,
    "authors/subspace-prediction": 1,
}


def cases(batch_sizes: Mapping[str, int]) -> dict[str, Setup]:
    """Every case of the peers, at the given batch sizes."""
    factories: dict[str, Callable[[int], Setup]] = {
        "curvlinops/kfac-factors": curvlinops_factors,
        "laplace-torch/backpack/isotropic-projector-and-posterior": laplace_ella,
        "authors/projector-and-posterior": authors_subspace,
        "authors/projector-and-posterior-with-kfac": authors_subspace_with_kfac,
        "authors/subspace-prediction": authors_prediction,
    }
    for name, backend in BACKENDS.items():
        factories[f"laplace-torch/{name}/kfac-fit"] = laplace_fit(backend, "kron")
        factories[f"laplace-torch/{name}/diagonal-fit"] = laplace_fit(backend, "diag")
        factories[f"laplace-torch/{name}/kfac-prediction"] = laplace_prediction(backend)
    for name, structure in {"full": "full", "kfac": "kron"}.items():
        factories[f"laplace-torch/{name}/last-layer-fit"] = laplace_last_layer_fit(structure)
        factories[f"laplace-torch/{name}/last-layer-prediction"] = laplace_last_layer_prediction(structure)
    return {name: factory(batch_sizes[name]) for name, factory in sorted(factories.items())}


def laplace_fit(backend: type[CurvatureInterface], structure: str) -> Callable[[int], Setup]:
    """Fit laplace-torch's posterior over all weights."""

    def factory(batch_size: int) -> Setup:
        def setup(network: nn.Module, inputs: Tensor, targets: Tensor) -> Callable[[], Any]:
            loader = DataLoader(TensorDataset(inputs, targets), batch_size)
            posterior = _laplace(network, backend, structure)
            return lambda: posterior.fit(loader)

        return setup

    return factory


def laplace_prediction(backend: type[CurvatureInterface]) -> Callable[[int], Setup]:
    """Linearised prediction (probit) of laplace-torch's KFAC posterior, which is fitted untimed."""

    def factory(batch_size: int) -> Setup:
        def setup(network: nn.Module, inputs: Tensor, targets: Tensor) -> Callable[[], Any]:
            posterior = _fitted_kfac(network, backend, inputs, targets)
            batches = inputs.split(batch_size)
            return lambda: torch.cat([posterior(x, pred_type="glm", link_approx="probit") for x in batches])

        return setup

    return factory


def laplace_last_layer_fit(structure: str) -> Callable[[int], Setup]:
    """Fit laplace-torch's posterior of the last layer, with its default backend."""

    def factory(batch_size: int) -> Setup:
        def setup(network: nn.Module, inputs: Tensor, targets: Tensor) -> Callable[[], Any]:
            loader = DataLoader(TensorDataset(inputs, targets), batch_size)
            return lambda: _last_layer(network, structure).fit(loader)

        return setup

    return factory


def laplace_last_layer_prediction(structure: str) -> Callable[[int], Setup]:
    """Linearised prediction (probit) of laplace-torch's posterior of the last layer, which is fitted untimed."""

    def factory(batch_size: int) -> Setup:
        def setup(network: nn.Module, inputs: Tensor, targets: Tensor) -> Callable[[], Any]:
            posterior = _last_layer(network, structure)
            posterior.fit(DataLoader(TensorDataset(inputs[:NUM_FIT_INPUTS], targets[:NUM_FIT_INPUTS]), 50))
            batches = inputs.split(batch_size)
            return lambda: torch.cat([posterior(x, pred_type="glm", link_approx="probit") for x in batches])

        return setup

    return factory


def _last_layer(network: nn.Module, structure: str) -> ParametricLaplace:
    return Laplace(
        network,
        "classification",
        subset_of_weights="last_layer",
        hessian_structure=structure,
        prior_precision=PRIOR_PRECISION,
    )


def laplace_ella(batch_size: int) -> Setup:
    """laplace-torch's ELLA: NUM_SUBSPACE_INPUTS Jacobian rows, one an input, span the subspace; then PᵀΛP.

    With backpack, whose Jacobians cost least; other backends take SUBSPACE_DIMENSION forward-mode passes a batch.
    """

    def setup(network: nn.Module, inputs: Tensor, targets: Tensor) -> Callable[[], Any]:
        loader = DataLoader(TensorDataset(inputs, targets), batch_size)
        posterior = ELLA(
            network,
            "classification",
            subsample_size=NUM_SUBSPACE_INPUTS,
            n_eigenvalues=SUBSPACE_DIMENSION,
            prior_precision=PRIOR_PRECISION,
            backend=BackPackGGN,
        )
        return lambda: posterior.fit(loader)

    return setup


def curvlinops_factors(batch_size: int) -> Setup:
    """The Kronecker factors alone, without laplace-torch around them and without eigendecompositions."""

    def setup(network: nn.Module, inputs: Tensor, targets: Tensor) -> Callable[[], Any]:
        batches = list(zip(inputs.split(batch_size), targets.split(batch_size), strict=True))

        def run() -> None:
            KFACLinearOperator(
                network,
                nn.CrossEntropyLoss(reduction="sum"),
                list(network.parameters()),
                batches,
                fisher_type=FisherType.TYPE2,
                kfac_approx=KFACType.EXPAND,
                separate_weight_and_bias=True,
                check_deterministic=False,
                num_data=len(inputs),
                num_per_example_loss_terms=1,
            ).compute_kronecker_factors()

        return run

    return setup


def authors_subspace(batch_size: int) -> Setup:
    """P = Ψ J_X′ᵀ U_s from NUM_SUBSPACE_INPUTS inputs and PᵀΛP over all inputs, Ψ (KFAC) given."""

    def setup(network: nn.Module, inputs: Tensor, targets: Tensor) -> Callable[[], Any]:
        precision = _fitted_kfac(network, CurvlinopsGGN, inputs, targets).posterior_precision

        def run() -> tuple[Tensor, Tensor]:
            projection = _projection(network, inputs[:NUM_SUBSPACE_INPUTS], precision, batch_size)
            return projection, _reduced_precision(network, inputs, projection, batch_size)

        return run

    return setup


def authors_subspace_with_kfac(batch_size: int) -> Setup:
    """The same with the time of Ψ: laplace-torch's KFAC of all inputs, curvlinops backend."""

    def setup(network: nn.Module, inputs: Tensor, targets: Tensor) -> Callable[[], Any]:
        loader = DataLoader(TensorDataset(inputs, targets), BATCH_SIZES["laplace-torch/curvlinops/kfac-fit"])
        posterior = _laplace(network, CurvlinopsGGN, "kron")

        def run() -> tuple[Tensor, Tensor]:
            posterior.fit(loader)
            precision = posterior.posterior_precision
            projection = _projection(network, inputs[:NUM_SUBSPACE_INPUTS], precision, batch_size)
            return projection, _reduced_precision(network, inputs, projection, batch_size)

        return run

    return setup


def authors_prediction(batch_size: int) -> Setup:
    """Probit prediction in the subspace of dimension SUBSPACE_DIMENSION; P and PᵀΛP are given."""

    def setup(network: nn.Module, inputs: Tensor, targets: Tensor) -> Callable[[], Any]:
        precision = _fitted_kfac(network, CurvlinopsGGN, inputs, targets).posterior_precision
        projection = _projection(network, inputs[:NUM_SUBSPACE_INPUTS], precision, batch_size)
        projection = torch.linalg.qr(projection).Q
        reduced = _reduced_precision(network, inputs[:NUM_FIT_INPUTS], projection, batch_size)
        root = torch.linalg.cholesky(reduced)

        @torch.no_grad()
        def predict(batch: Tensor) -> Tensor:
            outputs = network(batch)
            JP = _jacobian(network, batch) @ projection
            variances = torch.linalg.solve_triangular(root, JP.T, upper=False).square().sum(0)
            return torch.softmax(outputs / torch.sqrt(1 + torch.pi / 8 * variances.view_as(outputs)), dim=1)

        return lambda: torch.cat([predict(batch) for batch in inputs.split(batch_size)])

    return setup


def _laplace(network: nn.Module, backend: type[CurvatureInterface], structure: str) -> ParametricLaplace:
    # laplace-torch warns at every asdl prediction that it falls back to torch.func: the tables say so once.
    warnings.filterwarnings("ignore", message="ASDL backend is used")
    return Laplace(
        network,
        "classification",
        subset_of_weights="all",
        hessian_structure=structure,
        prior_precision=PRIOR_PRECISION,
        backend=backend,
    )


def _fitted_kfac(
    network: nn.Module, backend: type[CurvatureInterface], inputs: Tensor, targets: Tensor
) -> ParametricLaplace:
    dataset = TensorDataset(inputs[:NUM_FIT_INPUTS], targets[:NUM_FIT_INPUTS])
    posterior = _laplace(network, backend, "kron")
    posterior.fit(DataLoader(dataset, batch_size=10))
    return posterior


def _jacobian(network: nn.Module, inputs: Tensor) -> Tensor:
    """J of the whole batch (nC, p), by one vectorised reverse pass with respect to flat parameters."""
    parameters = dict(network.named_parameters())
    flat = torch.cat([parameter.detach().flatten() for parameter in parameters.values()])
    sizes = [parameter.numel() for parameter in parameters.values()]

    def outputs(flat: Tensor) -> Tensor:
        parts = zip(parameters.items(), flat.split(sizes), strict=True)
        return functional_call(network, {name: part.view_as(value) for (name, value), part in parts}, inputs)

    return jacrev(outputs)(flat).flatten(0, 1)


@torch.no_grad()
def _projection(network: nn.Module, inputs: Tensor, precision: KronDecomposed, batch_size: int) -> Tensor:
    """P (p, s): Ψ Jᵀ U_s, U_s the dominant eigenvectors of J Ψ Jᵀ."""
    J = torch.cat([_jacobian(network, batch) for batch in inputs.split(batch_size)])
    solved = precision.bmm(J.unsqueeze(0), exponent=-1).squeeze(0)
    U = torch.linalg.eigh(J @ solved.T).eigenvectors[:, -SUBSPACE_DIMENSION:]
    return solved.T @ U


@torch.no_grad()
def _reduced_precision(network: nn.Module, inputs: Tensor, projection: Tensor, batch_size: int) -> Tensor:
    """PᵀΛP (s, s): Σ (VᵀP)ᵀ(VᵀP) + λ PᵀP, with V = Jᵀ R and R = diag √φ − φ √φᵀ."""
    reduced = PRIOR_PRECISION * projection.T @ projection
    for batch in inputs.split(batch_size):
        phi = torch.softmax(network(batch), dim=1)
        R = torch.diag_embed(phi.sqrt()) - phi[:, :, None] * phi.sqrt()[:, None, :]
        J = _jacobian(network, batch).unflatten(0, phi.shape)
        VP = (R.mT @ (J @ projection)).flatten(0, 1)
        reduced += VP.T @ VP
    return reduced


CASES = cases(BATCH_SIZES)
