"""Passes over data after the fit: more data, a certificate, the full Laplace approximation of a few inputs."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from sublaplace.curvature.kfac import kronecker_ggn
from sublaplace.curvature.matrix_free import FullCovariance, MatrixFreePrecision
from sublaplace.curvature.reduced import reduced_ggn, reduced_ggn_and_product
from sublaplace.fitting import steps
from sublaplace.fitting.survey import Survey, survey_of
from sublaplace.jacobians.jacobian import Jacobians
from sublaplace.jacobians.linearization import Linearization
from sublaplace.posteriors.certificate import Certificate
from sublaplace.posteriors.protocol import Posterior
from sublaplace.posteriors.subspace import SubspacePosterior


def updated(
    direction_tolerance: float,
    posterior: SubspacePosterior,
    certificate: Certificate | None,
    survey: Survey,
    loader: Iterable[Any],
    linearization: Linearization,
    progress: bool,
) -> tuple[SubspacePosterior, Certificate | None, Survey]:
    """Return all three after more data, with P kept: one pass over these."""
    with linearization.borrowed():
        added, _ = survey_of(loader, linearization, survey.likelihood, estimate=False, progress=progress)
        stream = steps.curvature_stream(loader, linearization, added, direction_tolerance, progress)
        if certificate is None:
            curvatures = posterior.curvatures + reduced_ggn(stream, posterior.projection)
        else:
            more, products = reduced_ggn_and_product(steps.without_dropping(stream), posterior.projection)
            curvatures = certificate.subspace.curvatures + more
            product = {name: part.add_(products[name]) for name, part in certificate.product.items()}
    joined = survey.joined(added)
    scales = joined.likelihood.curvature_scales
    posterior = replace(posterior, curvatures=curvatures, scales=scales)
    if certificate is not None:
        # With several scales the products were summed over the outputs: they are made again when asked for.
        certificate = Certificate.of(posterior, product, scales[0]) if len(scales) == 1 else None
    return posterior, certificate, joined


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
        preconditioner = posterior.outside or kronecker_ggn(stream, posterior.prior_precision)
        return MatrixFreePrecision(stream, preconditioner, tolerance).full_covariance(jacobians)
