"""Our side of the benchmark: the same tasks as the peers', through the library's public pieces."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from protocol import NUM_FIT_INPUTS, NUM_SUBSPACE_INPUTS, PRIOR_PRECISION, SUBSPACE_DIMENSION, Setup
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from sublaplace import (
    Categorical,
    Drawn,
    Jacobian,
    Jacobians,
    Linearization,
    SubspaceLaplace,
    isotropic_precision,
    low_rank,
)
from sublaplace.curvature.diagonal import diagonal_ggn
from sublaplace.curvature.kfac import kronecker_ggn
from sublaplace.curvature.reduced import reduced_ggn
from sublaplace.curvature.stream import CurvatureStream
from sublaplace.model.likelihoods.links import probit

BATCH_SIZE = 500  # of the loader; the library cuts batches into chunks of its own


def curvature_stream(network: nn.Module, inputs: Tensor, targets: Tensor) -> CurvatureStream:
    loader = DataLoader(TensorDataset(inputs, targets), BATCH_SIZE)
    return CurvatureStream(Linearization(network), loader, Categorical())


def kfac_fit(network: nn.Module, inputs: Tensor, targets: Tensor) -> Callable[[], Any]:
    """Kronecker factors of all weights and their eigendecompositions; probing the network included."""
    return lambda: kronecker_ggn(curvature_stream(network, inputs, targets), PRIOR_PRECISION)


def diagonal_fit(network: nn.Module, inputs: Tensor, targets: Tensor) -> Callable[[], Any]:
    return lambda: diagonal_ggn(curvature_stream(network, inputs, targets), PRIOR_PRECISION)


def kfac_prediction(network: nn.Module, inputs: Tensor, targets: Tensor) -> Callable[[], Any]:
    """Linearised probit prediction of the KFAC posterior over all weights, which is fitted untimed."""
    stream = curvature_stream(network, inputs[:NUM_FIT_INPUTS], targets[:NUM_FIT_INPUTS])
    posterior = kronecker_ggn(stream, PRIOR_PRECISION)

    def probabilities(jacobian: Jacobian) -> Tensor:
        return probit(jacobian.outputs, posterior.covariance(jacobian).diagonal(dim1=1, dim2=2))

    def run() -> Tensor:
        return torch.cat(list(map(probabilities, stream.linearization.chunks(inputs))))

    return run


def subspace_prediction(network: nn.Module, inputs: Tensor, targets: Tensor) -> Callable[[], Any]:
    """Probit prediction in the subspace, as a user calls it; fitted untimed."""
    posterior = SubspaceLaplace.paper(
        network,
        "classification",
        dim=SUBSPACE_DIMENSION,
        prior_precision=PRIOR_PRECISION,
        subspace_inputs=Drawn(NUM_SUBSPACE_INPUTS),
    )
    posterior.fit(DataLoader(TensorDataset(inputs[:NUM_FIT_INPUTS], targets[:NUM_FIT_INPUTS]), BATCH_SIZE))
    return lambda: posterior(inputs)


def projector_and_posterior(network: nn.Module, inputs: Tensor, targets: Tensor) -> Callable[[], Any]:
    """P from NUM_SUBSPACE_INPUTS inputs and PᵀΛP over all inputs, KFAC given."""
    stream = curvature_stream(network, inputs, targets)
    fitted = curvature_stream(network, inputs[:NUM_FIT_INPUTS], targets[:NUM_FIT_INPUTS])
    precision = kronecker_ggn(fitted, PRIOR_PRECISION)

    def run() -> Tensor:
        jacobians = Jacobians(stream.linearization, inputs[:NUM_SUBSPACE_INPUTS])
        return reduced_ggn(stream, low_rank(jacobians, precision, SUBSPACE_DIMENSION))

    return run


def projector_and_posterior_with_kfac(network: nn.Module, inputs: Tensor, targets: Tensor) -> Callable[[], Any]:
    """The same with the time of KFAC: what `fit` does."""

    def run() -> Tensor:
        stream = curvature_stream(network, inputs, targets)
        precision = kronecker_ggn(stream, PRIOR_PRECISION)
        jacobians = Jacobians(stream.linearization, inputs[:NUM_SUBSPACE_INPUTS])
        return reduced_ggn(stream, low_rank(jacobians, precision, SUBSPACE_DIMENSION))

    return run


def isotropic_projector_and_posterior(network: nn.Module, inputs: Tensor, targets: Tensor) -> Callable[[], Any]:
    """The same with Ψ = λ⁻¹ I in place of KFAC."""
    stream = curvature_stream(network, inputs, targets)

    def run() -> Tensor:
        precision = isotropic_precision(stream.linearization.layout, inputs, PRIOR_PRECISION)
        jacobians = Jacobians(stream.linearization, inputs[:NUM_SUBSPACE_INPUTS])
        return reduced_ggn(stream, low_rank(jacobians, precision, SUBSPACE_DIMENSION))

    return run


CASES: dict[str, Setup] = {
    "sublaplace/kfac-fit": kfac_fit,
    "sublaplace/diagonal-fit": diagonal_fit,
    "sublaplace/kfac-prediction": kfac_prediction,
    "sublaplace/subspace-prediction": subspace_prediction,
    "sublaplace/projector-and-posterior": projector_and_posterior,
    "sublaplace/projector-and-posterior-with-kfac": projector_and_posterior_with_kfac,
    "sublaplace/isotropic-projector-and-posterior": isotropic_projector_and_posterior,
}
