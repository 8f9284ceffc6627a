"""Honest uncertainty for trained PyTorch networks: the Laplace approximation in a subspace of their parameters."""

from sublaplace import metrics
from sublaplace.curvature.cache import Curvatures
from sublaplace.curvature.exact_precision import DensePrecision, DualPrecision
from sublaplace.curvature.precision import BlockPrecision, isotropic_precision
from sublaplace.curvature.stream import CurvatureStream
from sublaplace.data.subspace_inputs import Drawn, Perturbed
from sublaplace.fitting.estimating import Estimate
from sublaplace.fitting.map_training import train
from sublaplace.fitting.training_recipe import Training
from sublaplace.jacobians.blocks import OuterBlock
from sublaplace.jacobians.chunks import ChunkPolicy
from sublaplace.jacobians.jacobian import Jacobian, Jacobians
from sublaplace.jacobians.linearization import Linearization
from sublaplace.laplace import SubspaceLaplace
from sublaplace.model.likelihoods.base import Likelihood
from sublaplace.model.likelihoods.bernoulli import Bernoulli
from sublaplace.model.likelihoods.categorical import Categorical
from sublaplace.model.likelihoods.gaussian import Gaussian
from sublaplace.model.prediction import Prediction
from sublaplace.options import Captured, Complement, Resources
from sublaplace.posteriors.certificate import Bounds, Certificate
from sublaplace.posteriors.complement import ComplementedPosterior
from sublaplace.posteriors.subspace import SubspacePosterior
from sublaplace.projection import Basis, Subset
from sublaplace.projectors.context import ProjectorContext
from sublaplace.projectors.low_rank import low_rank
from sublaplace.projectors.registry import PROJECTORS, Projector, projector
from sublaplace.runtime.files import SavedFileError

__version__ = "0.2.0.dev0"

__all__ = [
    "PROJECTORS",
    "Basis",
    "Bernoulli",
    "BlockPrecision",
    "Bounds",
    "Captured",
    "Categorical",
    "Certificate",
    "ChunkPolicy",
    "Complement",
    "ComplementedPosterior",
    "CurvatureStream",
    "Curvatures",
    "DensePrecision",
    "Drawn",
    "DualPrecision",
    "Estimate",
    "Gaussian",
    "Jacobian",
    "Jacobians",
    "Likelihood",
    "Linearization",
    "OuterBlock",
    "Perturbed",
    "Prediction",
    "Projector",
    "ProjectorContext",
    "Resources",
    "SavedFileError",
    "Subset",
    "SubspaceLaplace",
    "SubspacePosterior",
    "Training",
    "isotropic_precision",
    "low_rank",
    "metrics",
    "projector",
    "train",
]
