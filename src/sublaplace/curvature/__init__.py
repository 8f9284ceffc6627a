"""From data to curvature: the GGN as a diagonal, Kronecker-factored, exact or reduced to a subspace."""

from sublaplace.curvature.diagonal import diagonal_ggn
from sublaplace.curvature.ggn import exact_ggn
from sublaplace.curvature.kfac import kronecker_ggn
from sublaplace.curvature.reduced import reduced_ggn, reduced_ggn_and_product
from sublaplace.curvature.stream import CurvatureStream

__all__ = ["CurvatureStream", "diagonal_ggn", "exact_ggn", "kronecker_ggn", "reduced_ggn", "reduced_ggn_and_product"]
