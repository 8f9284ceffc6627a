"""The settings for each data set: network, training, subspace and prior, one row per set."""

import hashlib
import json
from dataclasses import asdict, dataclass

import numpy as np
import torch

from sublaplace import PROJECTORS


@dataclass(frozen=True)
class TrainingRecipe:
    """The training that finds θ̂: Adam with L2 regularisation, clipped gradients, and a piecewise linear schedule.

    The learning rate rises linearly from 1e-4 of its value over the fraction `warm` of the steps, stays constant, and
    falls linearly to 0 from the fraction `decay` on. A network of no epochs comes trained. `augmentation` names a
    random change of the training pictures.
    """

    learning_rate: float
    epochs: int
    warm: float
    decay: float
    batch_size: int
    weight_decay: float = 1e-4
    gradient_norm: float = 1.0
    augmentation: str = ""

    def learning_rate_at(self, step: int, num_steps: int) -> float:
        """Return the learning rate of step 0 ≤ `step` < `num_steps`."""
        done = step / num_steps
        factor = 1.0
        if done < self.warm:
            factor = 1e-4 + (1 - 1e-4) * done / self.warm
        if done >= self.decay:
            factor = min(factor, (1 - done) / (1 - self.decay))
        return self.learning_rate * factor


COMPARED_DIMS = (100, 400)
"""s at which all methods are compared, including those with KFAC outside of the subspace."""

LARGE_TOLERANCE = 1e-4
"""`Recipe.direction_tolerance` of large networks, to save time: a third of the directions that 1e-8 leaves."""


@dataclass(frozen=True)
class Recipe:
    """All settings of one data set.

    `num_inputs` is n: the number of training inputs X′ that P is built from, and the number of test inputs drawn for
    KL, log-trace and relative error (at most the whole test set). σ of regression is the standard deviation of the
    training residuals.
    """

    dataset: str
    network: str
    training: TrainingRecipe
    num_inputs: int
    largest_dim: int
    prior_precision: float
    swag_snapshots: int = 10
    # The published rate; if it diverges, the largest of .003, .001, .0003 at which the training loss does not grow.
    swag_learning_rate: float = 0.01
    dtype: torch.dtype = torch.float64  # of everything except the exact GGN, which is always float64
    small_dims: tuple[int, ...] = ()  # in addition to the grid
    large_subset_dims: tuple[int, ...] = ()  # in addition to the grid, for methods that choose single parameters
    corrupted_dims: tuple[int, ...] = ()  # s on corrupted test sets; empty: there are none
    maps_sensitivity: bool = False  # the sensitivity of every parameter is kept for a heat map
    num_seeds: int = 5  # of a complete run
    direction_tolerance: float = 1e-8  # share of the output Hessians' trace that may be dropped, also in float64
    # For networks whose exact GGN, p × p, is out of reach: there is no full posterior to compare with.
    large: bool = False
    num_curvature_inputs: int | None = None  # training inputs that stand for all in the curvature
    num_scored: int | None = None  # test inputs that are scored; the temperature is fitted on the others
    num_corrupted: int | None = None  # of them those that are corrupted, at every severity
    certified_dims: tuple[int, ...] = ()  # s at which the captured share of the trace is certified

    def dims(self, projector: str) -> list[int]:
        """Return the subspace dimensions s, ascending: a grid of ten, those compared, and extra ones of this set."""
        grid = {int(s) for s in np.linspace(10, self.largest_dim, 10)} | set(self.small_dims)
        grid |= {s for s in COMPARED_DIMS if s < self.largest_dim}
        chooses_parameters = projector in PROJECTORS and not PROJECTORS[projector].stores_matrix
        return sorted(grid | set(self.large_subset_dims) if chooses_parameters else grid)

    @property
    def compared_dims(self) -> list[int]:
        """`COMPARED_DIMS`; for a large network at most the largest of its grid, to save memory."""
        return sorted({min(s, self.largest_dim) if self.large else s for s in COMPARED_DIMS})

    def training_fingerprint(self) -> str:
        """Return a digest of everything except the seed that trained weights depend on."""
        # Unused parts are left out, so that weights keep their fingerprint when recipes get new parts.
        training = {name: value for name, value in asdict(self.training).items() if value != ""}
        facts = {"dataset": self.dataset, "network": self.network, **training}
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]


def _tabular(initial: float, epochs: int, warm: float, decay: float, batch_size: int) -> TrainingRecipe:
    # The tabular sets' learning rate grows with the batch, which is the whole training set but for naval.
    return TrainingRecipe(initial * batch_size / 256, epochs, warm, decay, batch_size)


def _imagenet10(dataset: str, network: str, training: TrainingRecipe, num_seeds: int = 1) -> Recipe:
    return Recipe(
        dataset,
        network,
        training,
        num_inputs=100,
        largest_dim=100,
        prior_precision=13.0,
        dtype=torch.float32,
        num_seeds=num_seeds,
        direction_tolerance=LARGE_TOLERANCE,
        large=True,
    )


_REDWINE = _tabular(0.0004, 300, 0.3, 0.3, 1279)

RECIPES: dict[str, Recipe] = {
    recipe.dataset: recipe
    for recipe in (
        Recipe(
            "enb",
            "mlp-8-2",
            _tabular(0.004, 1500, 0.1, 0.5, batch_size=614),
            num_inputs=614,
            largest_dim=972,
            prior_precision=2.003,
            swag_snapshots=100,
            swag_learning_rate=0.003,
            maps_sensitivity=True,
        ),
        Recipe(
            "redwine",
            "mlp-11-1",
            _REDWINE,
            num_inputs=1000,
            largest_dim=753,
            prior_precision=6.538,
            swag_learning_rate=0.0003,
            small_dims=tuple(range(1, 21)),
            large_subset_dims=(1000, 2000, 4000, 6000, 8000, 10000, 12000, 15000),
        ),
        Recipe(
            "redwine-standardised",
            "mlp-11-1",
            _REDWINE,
            num_inputs=1000,
            largest_dim=753,
            prior_precision=6.538,
        ),
        Recipe(
            "california",
            "mlp-8-1",
            _tabular(0.0004, 100, 0.3, 0.5, batch_size=16512),
            num_inputs=5000,
            largest_dim=5000,
            prior_precision=8.844,
            maps_sensitivity=True,
        ),
        Recipe(
            "naval",
            "mlp-14-2",
            _tabular(0.0004, 100, 0.3, 0.5, batch_size=1000),
            num_inputs=1000,
            largest_dim=1222,
            prior_precision=4.336,
            swag_learning_rate=0.001,
        ),
        Recipe(
            "mnist",
            "cnn",
            TrainingRecipe(0.004, 20, 0.1, 0.3, batch_size=256),
            num_inputs=100,
            largest_dim=1000,
            prior_precision=18.94,
            dtype=torch.float32,
            corrupted_dims=(100,),
        ),
        Recipe(
            "fashionmnist",
            "cnn",
            TrainingRecipe(0.002, 40, 0.1, 0.5, batch_size=256),
            num_inputs=100,
            largest_dim=1000,
            prior_precision=32.69,
            dtype=torch.float32,
        ),
        Recipe(
            "cifar10",
            "resnet9",
            # The published recipe has 100 epochs.
            TrainingRecipe(0.004, 12, 0.1, 0.7, batch_size=256, augmentation="cifar10"),
            num_inputs=100,
            largest_dim=1000,
            prior_precision=68.07,
            dtype=torch.float32,
            corrupted_dims=(100, 200, 300),
            num_seeds=1,
            direction_tolerance=LARGE_TOLERANCE,
            large=True,
            num_curvature_inputs=5000,
            num_scored=2000,
            num_corrupted=200,
            certified_dims=(100, 500),
        ),
        # From scratch: the published recipe fine-tunes, with a batch of 256, which is most of these images.
        _imagenet10("imagenet10", "resnet18", TrainingRecipe(0.0004, 40, 0.1, 0.5, 32)),
        _imagenet10("imagenet10-efficientnet", "efficientnet-lite0", TrainingRecipe(0.0, 0, 0.0, 1.0, 32)),
        # Its weights are a file that the user has.
        _imagenet10(
            "imagenet10-finetuned",
            "resnet18-imagenet",
            TrainingRecipe(0.0004, 10, 0.5, 0.5, 256),
            num_seeds=0,
        ),
    )
}
