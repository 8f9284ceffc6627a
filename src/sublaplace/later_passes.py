"""Passes over data after the fit: more data, a certificate, the full Laplace approximation of a few inputs."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from sublaplace.certificate import Certificate
from sublaplace.complement import ComplementedPosterior
from sublaplace.curvature import kronecker_ggn, reduced_ggn, reduced_ggn_and_product
from sublaplace.jacobians import Jacobians, Linearization
from sublaplace.matrix_free import FullCovariance, MatrixFreePrecision
from sublaplace.posterior import Posterior, SubspacePosterior
from sublaplace.settings import Settings
from sublaplace.survey import Survey, survey_of


def updated(
    settings: Settings,
    posterior: SubspacePosterior,
    certificate: Certificate | None,
    survey: Survey,
    loader: Iterable[Any],
    linearization: Linearization,
    progress: bool,
) -> tuple[SubspacePosterior, Certificate | None, Survey]:
    """All three after more data, with P kept: one pass over these."""
    with linearization.borrowed():
        added, _ = survey_of(loader, linearization, survey.likelihood, None, lambda _: None, progress)
        stream = settings.stream(loader, linearization, added, progress)
        if certificate is None:
            curvatures = posterior.curvatures + reduced_ggn(stream, posterior.projection)
        else:
            more, products = reduced_ggn_and_product(replace(stream, tolerance=0.0), posterior.projection)
            curvatures = certificate.subspace.curvatures + more
            product = {name: part.add_(products[name]) for name, part in certificate.product.items()}
    joined = survey.joined(added)
    scales = joined.likelihood.curvature_scales
    posterior = replace(posterior, curvatures=curvatures, scales=scales)
    if certificate is not None:
        # With several scales the products were summed over the outputs: they are made anew when asked for.
        certificate = Certificate.of(posterior, product, scales[0]) if len(scales) == 1 else None
    return posterior, certificate, joined


def certificate_of(
    settings: Settings,
    posterior: SubspacePosterior,
    survey: Survey,
    loader: Iterable[Any],
    linearization: Linearization,
    progress: bool,
) -> Certificate:
    """The certificate of a posterior that was fitted without one: one pass over the data, nothing dropped."""
    stream = replace(settings.stream(loader, linearization, survey, progress), tolerance=0.0)
    with linearization.borrowed():
        curvatures, product = reduced_ggn_and_product(stream, posterior.projection)
    return Certificate.of(replace(posterior, curvatures=curvatures), product, stream.scale)


def full_covariance_of(
    settings: Settings,
    posterior: Posterior,
    survey: Survey,
    loader: Iterable[Any],
    jacobians: Jacobians,
    tolerance: float,
    progress: bool,
) -> FullCovariance:
    """The full Laplace approximation's covariance of a few inputs, with KFAC as the preconditioner."""
    stream = replace(settings.stream(loader, jacobians.linearization, survey, progress), tolerance=0.0)
    with jacobians.linearization.borrowed():
        if isinstance(posterior, ComplementedPosterior):
            preconditioner = posterior.outside
        else:
            preconditioner = kronecker_ggn(stream, posterior.prior_precision)
        return MatrixFreePrecision(stream, preconditioner, tolerance).full_covariance(jacobians)
