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
    CurvatureStream,
    Drawn,
    Jacobian,
    Jacobians,
    Linearization,
    Resources,
    SubspaceLaplace,
    isotropic_precision,
    low_rank,
)
from sublaplace.curvature.diagonal import diagonal_ggn
from sublaplace.curvature.kfac import kronecker_ggn
from sublaplace.curvature.reduced import reduced_ggn
from sublaplace.model.likelihoods.links import probit

BATCH_SIZE = 500  # of the loader; the library cuts batches into chunks of its own
USERS_BATCH_SIZE = 50  # of the networks that users have, whose forward passes take whole batches


def curvature_stream(network: nn.Module, inputs: Tensor, targets: Tensor) -> CurvatureStream:
    """Return the data as rows of the GGN's root, for passes over them with the tolerance of a fit."""
    loader = DataLoader(TensorDataset(inputs, targets), BATCH_SIZE)
    linearization = Linearization(network)
    return CurvatureStream(linearization, loader, Categorical(), Resources().tolerance(linearization.dtype))


def kfac_fit(network: nn.Module, inputs: Tensor, targets: Tensor) -> Callable[[], Any]:
    """Fit the Kronecker factors of all weights and their eigendecompositions; probing the network included."""
    return lambda: kronecker_ggn(curvature_stream(network, inputs, targets), PRIOR_PRECISION)


def diagonal_fit(network: nn.Module, inputs: Tensor, targets: Tensor) -> Callable[[], Any]:
    """Fit the diagonal of the GGN; probing the network included."""
    return lambda: diagonal_ggn(curvature_stream(network, inputs, targets), PRIOR_PRECISION)


def kfac_prediction(network: nn.Module, inputs: Tensor, targets: Tensor) -> Callable[[], Any]:
    """Predict with the linearised KFAC posterior over all weights and the probit link; fitted untimed."""
    stream = curvature_stream(network, inputs[:NUM_FIT_INPUTS], targets[:NUM_FIT_INPUTS])
    posterior = kronecker_ggn(stream, PRIOR_PRECISION)

    def probabilities(jacobian: Jacobian) -> Tensor:
        return probit(jacobian.outputs, posterior.variance(jacobian))

    def run() -> Tensor:
        return torch.cat(list(map(probabilities, stream.linearization.chunks(inputs))))

    return run


def subspace_prediction(network: nn.Module, inputs: Tensor, targets: Tensor) -> Callable[[], Any]:
    """Predict in the subspace with the probit link, as a user does; fitted untimed."""
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
    """Build P from NUM_SUBSPACE_INPUTS inputs and PᵀΛP from all inputs, with KFAC given."""
    stream = curvature_stream(network, inputs, targets)
    fitted = curvature_stream(network, inputs[:NUM_FIT_INPUTS], targets[:NUM_FIT_INPUTS])
    precision = kronecker_ggn(fitted, PRIOR_PRECISION)

    def run() -> Tensor:
        jacobians = Jacobians(stream.linearization, inputs[:NUM_SUBSPACE_INPUTS])
        return reduced_ggn(stream, low_rank(jacobians, precision, SUBSPACE_DIMENSION))

    return run


def projector_and_posterior_with_kfac(network: nn.Module, inputs: Tensor, targets: Tensor) -> Callable[[], Any]:
    """Build KFAC, P and PᵀΛP, as `fit` does."""

    def run() -> Tensor:
        stream = curvature_stream(network, inputs, targets)
        precision = kronecker_ggn(stream, PRIOR_PRECISION)
        jacobians = Jacobians(stream.linearization, inputs[:NUM_SUBSPACE_INPUTS])
        return reduced_ggn(stream, low_rank(jacobians, precision, SUBSPACE_DIMENSION))

    return run


def isotropic_projector_and_posterior(network: nn.Module, inputs: Tensor, targets: Tensor) -> Callable[[], Any]:
    """Build P and PᵀΛP with Ψ = λ⁻¹ I instead of KFAC."""
    stream = curvature_stream(network, inputs, targets)

    def run() -> Tensor:
        precision = isotropic_precision(stream.linearization.layout, inputs, PRIOR_PRECISION)
        jacobians = Jacobians(stream.linearization, inputs[:NUM_SUBSPACE_INPUTS])
        return reduced_ggn(stream, low_rank(jacobians, precision, SUBSPACE_DIMENSION))

    return run


def last_layer_fit(network: nn.Module, inputs: Tensor, targets: Tensor) -> Callable[[], Any]:
    """Fit the posterior of the last layer, exact or with Kronecker factors by its size, as a user does."""
    return lambda: _last_layer(network).fit(_loader(inputs, targets))


def last_layer_prediction(network: nn.Module, inputs: Tensor, targets: Tensor) -> Callable[[], Any]:
    """Predict with the posterior of the last layer and the probit link; fitted untimed."""
    posterior = _last_layer(network).fit(_loader(inputs[:NUM_FIT_INPUTS], targets[:NUM_FIT_INPUTS]))
    batches = inputs.split(USERS_BATCH_SIZE)
    return lambda: [posterior(x, link="probit") for x in batches]


def default_fit(network: nn.Module, inputs: Tensor, targets: Tensor) -> Callable[[], Any]:
    """Fit the default posterior, λ by leave-one-out, as a user does."""
    return lambda: SubspaceLaplace(network, "classification").fit(_loader(inputs, targets))


def default_prediction(network: nn.Module, inputs: Tensor, targets: Tensor) -> Callable[[], Any]:
    """Predict with the default posterior and the probit link; fitted untimed, λ given."""
    posterior = _default(network, inputs, targets)
    batches = inputs.split(USERS_BATCH_SIZE)
    return lambda: [posterior(x, link="probit") for x in batches]


def default_tuning(network: nn.Module, inputs: Tensor, targets: Tensor) -> Callable[[], Any]:
    """Tune λ of the default posterior on these inputs; fitted untimed."""
    posterior = _default(network, inputs, targets)
    return lambda: posterior.tuned(_loader(inputs, targets))


def _default(network: nn.Module, inputs: Tensor, targets: Tensor) -> SubspaceLaplace:
    posterior = SubspaceLaplace(network, "classification", prior_precision=PRIOR_PRECISION)
    return posterior.fit(_loader(inputs[:NUM_FIT_INPUTS], targets[:NUM_FIT_INPUTS]))


def _last_layer(network: nn.Module) -> SubspaceLaplace:
    return SubspaceLaplace(
        network, "classification", projector="last-layer", complement=None, prior_precision=PRIOR_PRECISION
    )


def _loader(inputs: Tensor, targets: Tensor) -> DataLoader[Any]:
    return DataLoader(TensorDataset(inputs, targets), USERS_BATCH_SIZE)


CASES: dict[str, Setup] = {
    "sublaplace/kfac-fit": kfac_fit,
    "sublaplace/diagonal-fit": diagonal_fit,
    "sublaplace/kfac-prediction": kfac_prediction,
    "sublaplace/subspace-prediction": subspace_prediction,
    "sublaplace/projector-and-posterior": projector_and_posterior,
    "sublaplace/projector-and-posterior-with-kfac": projector_and_posterior_with_kfac,
    "sublaplace/isotropic-projector-and-posterior": isotropic_projector_and_posterior,
    "sublaplace/last-layer-fit": last_layer_fit,
    "sublaplace/last-layer-prediction": last_layer_prediction,
    "sublaplace/default-fit": default_fit,
    "sublaplace/default-prediction": default_prediction,
    "sublaplace/default-tuning": default_tuning,
}
