"""Passes over data after the fit: more data, a certificate, the full Laplace approximation of a few inputs."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from sublaplace.curvature.diagonal import diagonal_ggn
from sublaplace.curvature.kfac import kronecker_ggn
from sublaplace.curvature.last_layer import last_layer_ggn
from sublaplace.curvature.matrix_free import FullCovariance, MatrixFreePrecision
from sublaplace.curvature.precision import BlockPrecision
from sublaplace.curvature.reduced import reduced_ggn, reduced_ggn_and_product
from sublaplace.curvature.stream import CurvatureStream
from sublaplace.data.batches import batches
from sublaplace.fitting import steps
from sublaplace.fitting.fitted import Fitted
from sublaplace.fitting.survey import Survey, survey_of
from sublaplace.jacobians.jacobian import Jacobians
from sublaplace.jacobians.linearization import Linearization
from sublaplace.model.linalg import Vectors
from sublaplace.options import Resources
from sublaplace.posteriors.certificate import Certificate
from sublaplace.posteriors.complement import ComplementedPosterior
from sublaplace.posteriors.protocol import Posterior
from sublaplace.posteriors.subspace import SubspacePosterior


def updated(
    fitted: Fitted, outside_kind: str, resources: Resources, seed: int, loader: Iterable[Any], progress: bool
) -> Fitted:
    """Return what a fit on both data sets with the same P, λ and weight gives, by one pass over `loader`.

    With sampled directions, those of the new data are drawn as if their places began at 0.

    Raises:
        ValueError: for a posterior over all parameters without a subspace or complement.
    """
    posterior, survey, linearization = fitted.posterior, fitted.survey, fitted.linearization
    subspace, outside, certificate = posterior.subspace, posterior.outside, fitted.certificate
    if subspace is None and outside is None:
        raise ValueError("projector='full' cannot be updated; fit again on all data.")
    with linearization.borrowed():
        added, _ = survey_of(loader, linearization, survey.likelihood, estimate=False, progress=progress)
        joined = survey.joined(added)
        scales = joined.likelihood.curvature_scales
        if outside is not None and len(scales) > 1 and joined.noise_std != survey.noise_std:
            raise ValueError(
                "A σ for each output that is estimated again cannot be put into the curvature outside of the subspace; "
                "fit again on all data, or give σ, as in Gaussian((0.1, 0.2))."
            )
        tolerance, samples = resources.tolerance(linearization.dtype), resources.samples(survey.num_outputs)
        stream = steps.curvature_stream(loader, linearization, added, tolerance, progress, samples, seed)
        outside = None if outside is None else _more_outside(outside, stream, outside_kind)
        if subspace is None:
            assert outside is not None
            return replace(fitted, posterior=outside.scaled(joined.likelihood.single_scale), survey=joined)
        exact = steps.without_dropping(stream) if certificate is not None else stream
        product: Vectors | None = None
        if certificate is None and outside is None:
            curvatures = subspace.curvatures + reduced_ggn(exact, subspace.projection)
        else:
            more, product = reduced_ggn_and_product(exact, subspace.projection)
            before = subspace if certificate is None else certificate.subspace
            curvatures = before.curvatures + more
    inside = replace(subspace, curvatures=curvatures, scales=scales)
    result: Posterior = inside
    if outside is not None:
        assert product is not None and isinstance(posterior, ComplementedPosterior)
        unit = joined.likelihood.single_scale
        whole = {n: (y.div_(subspace.unit) + product[n]).mul_(unit) for n, y in posterior.product().items()}
        result = ComplementedPosterior.of(inside, outside.scaled(unit), whole)
    if certificate is not None:
        assert product is not None
        whole = {name: part.add_(product[name]) for name, part in certificate.product.items()}
        # With several scales the products were summed over the outputs: they are made again when asked for.
        certificate = Certificate.of(inside, whole, scales[0]) if len(scales) == 1 else None
    return replace(fitted, posterior=result, certificate=certificate, survey=joined)


def _more_outside(outside: BlockPrecision, stream: CurvatureStream, kind: str) -> BlockPrecision:
    """Return the approximate curvature of both data sets, in units of the likelihood's scale."""
    if not outside.covers_all:
        names, C = tuple(outside.parts), stream.linearization.num_outputs(next(batches(stream.loader)).inputs)
        return outside.joined(last_layer_ggn(stream, names, C, outside.prior_precision))
    made = diagonal_ggn if kind == "diagonal" else kronecker_ggn
    return outside.joined(made(stream, outside.prior_precision))


def certificate_of(
    posterior: SubspacePosterior,
    survey: Survey,
    loader: Iterable[Any],
    linearization: Linearization,
    progress: bool,
) -> Certificate:
    """Return the certificate of a posterior fitted without one: one pass over the data, nothing dropped."""
    stream = steps.curvature_stream(loader, linearization, survey, tolerance=0.0, progress=progress)
    with linearization.borrowed():
        curvatures, product = reduced_ggn_and_product(stream, posterior.projection)
    return Certificate.of(replace(posterior, curvatures=curvatures), product, stream.scale)


def full_covariance_of(
    posterior: Posterior,
    survey: Survey,
    loader: Iterable[Any],
    linearization: Linearization,
    jacobians: Jacobians,
    tolerance: float,
    progress: bool,
) -> FullCovariance:
    """Return the full Laplace approximation's covariance of a few inputs, with KFAC as the preconditioner."""
    stream = steps.curvature_stream(loader, linearization, survey, tolerance=0.0, progress=progress)
    with linearization.borrowed():
        preconditioner = posterior.outside
        if preconditioner is None or not preconditioner.covers_all:
            preconditioner = kronecker_ggn(stream, posterior.prior_precision)
        return MatrixFreePrecision(stream, preconditioner, tolerance).full_covariance(jacobians)
