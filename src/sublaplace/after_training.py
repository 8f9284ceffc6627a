"""What callbacks of training loops do at the end: fit the posterior, tune it on validation data, and score it."""

from collections.abc import Iterable
from typing import Any

from torch import nn

from sublaplace.evaluation import Evaluation
from sublaplace.laplace import SubspaceLaplace
from sublaplace.model.borrowing import in_evaluation_mode
from sublaplace.model.likelihoods.base import Likelihood
from sublaplace.options import AUTO
from sublaplace.runtime.warning import warn


class AfterTraining:
    """The posterior of a network that a training loop has trained, and its scores.

    Args:
        likelihood: as of `SubspaceLaplace`.
        options: any other argument of `SubspaceLaplace`.

    Attributes:
        posterior: the fitted `SubspaceLaplace`; None before the end of the training.
        evaluation: the plain network next to the posterior; None without validation data.
        metrics: all scores of both, by names such as "plain/nll" and "posterior/ece".
    """

    def __init__(self, likelihood: str | Likelihood, options: dict[str, Any]) -> None:
        self.likelihood, self.options = likelihood, options
        self.posterior: SubspaceLaplace | None = None
        self.evaluation: Evaluation | None = None
        self.metrics: dict[str, float] = {}

    def check(self, model: nn.Module) -> None:
        """Raise the errors of wrong options before the training, not after it."""
        self._laplace(model)

    def fit(
        self,
        model: nn.Module,
        train_loader: Iterable[Any],
        val_loader: Iterable[Any] | None,
        test_loader: Iterable[Any] | None,
        how_to_validate: str,
    ) -> None:
        """Fit, tune and score the posterior.

        Args:
            model: the trained network.
            train_loader: the training data.
            val_loader: validation data; λ is tuned on them unless the options say how it is chosen.
            test_loader: what is scored; None: the validation data.
            how_to_validate: how validation data are given, for the message if there are none.
        """
        if val_loader is None and test_loader is None:
            warn(
                "There are no validation data: the posterior is fitted without them, λ follows from the training data, "
                f"and neither NLL nor ECE can be logged. {how_to_validate}"
            )
        tunes = self.options.get("prior_precision", AUTO) == AUTO
        with in_evaluation_mode(model):
            self.posterior = self._laplace(model).fit(train_loader, val_loader if tunes else None)
        scored = val_loader if test_loader is None else test_loader
        if scored is not None:
            self.evaluation = self.posterior.evaluate(scored)
            both = (("plain", self.evaluation.plain), ("posterior", self.evaluation.posterior))
            self.metrics = {f"{who}/{name}": value for who, one in both for name, value in one.scores.items()}

    def _laplace(self, model: nn.Module) -> SubspaceLaplace:
        return SubspaceLaplace(model, self.likelihood, **self.options)


class Results:
    """What callbacks show of the `AfterTraining` that they hold as `_after`."""

    _after: AfterTraining

    @property
    def posterior(self) -> SubspaceLaplace | None:
        """The fitted posterior; None before the end of the training."""
        return self._after.posterior

    @property
    def evaluation(self) -> Evaluation | None:
        """The plain network next to the posterior; None before the end, and without validation data."""
        return self._after.evaluation

    @property
    def metrics(self) -> dict[str, float]:
        """What was logged."""
        return self._after.metrics
