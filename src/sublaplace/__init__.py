"""Honest uncertainty for trained PyTorch networks: the Laplace approximation in a subspace of their parameters."""

from sublaplace import metrics
from sublaplace.certificate import Bounds, Certificate
from sublaplace.checked_file import SavedFileError
from sublaplace.complement import ComplementedPosterior
from sublaplace.jacobians import Jacobian, Jacobians, Linearization, OuterBlock
from sublaplace.laplace import SubspaceLaplace
from sublaplace.likelihoods import Bernoulli, Categorical, Gaussian
from sublaplace.posterior import SubspacePosterior
from sublaplace.precision import BlockPrecision, DensePrecision, DualPrecision, isotropic_precision
from sublaplace.predictive import Prediction
from sublaplace.projection import Basis, Subset
from sublaplace.projectors.context import ProjectorContext
from sublaplace.projectors.low_rank import low_rank
from sublaplace.projectors.names import PROJECTORS

__version__ = "0.1.0"

__all__ = [
    "PROJECTORS",
    "Basis",
    "Bernoulli",
    "BlockPrecision",
    "Bounds",
    "Categorical",
    "Certificate",
    "ComplementedPosterior",
    "DensePrecision",
    "DualPrecision",
    "Gaussian",
    "Jacobian",
    "Jacobians",
    "Linearization",
    "OuterBlock",
    "Prediction",
    "ProjectorContext",
    "SavedFileError",
    "Subset",
    "SubspaceLaplace",
    "SubspacePosterior",
    "isotropic_precision",
    "low_rank",
    "metrics",
]
