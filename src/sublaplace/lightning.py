"""A callback for Lightning that gives the trained network a posterior.

Install with ``pip install 'sublaplace[lightning]'``.
"""

import copy
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import nn

from sublaplace.after_training import AfterTraining, Results
from sublaplace.model.likelihoods.base import Likelihood

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
except ImportError as error:
    raise ImportError("sublaplace.lightning needs Lightning: pip install 'sublaplace[lightning]'.") from error


class SubspaceLaplaceCallback(Results, Callback):
    """A callback that fits `SubspaceLaplace` at the end of the training, and logs its scores.

    λ (and σ) are tuned on the validation data of the trainer. The scores of the plain network and of the posterior,
    such as "plain/nll" and "posterior/ece", go to the trainer's loggers. They are those of the validation data, unless
    other data are given; λ was tuned on these, so the posterior's are slightly optimistic. Cost: one fit, see
    `SubspaceLaplace`.

    Args:
        likelihood: as of `SubspaceLaplace`.
        network: from the module to the network whose posterior is fitted, such as ``lambda module: module.network``.
            None: the module itself, whose `forward` maps a batch's inputs to outputs and does not use the trainer.
        train_loader: the training data as the fit is to see them, for example without augmentation. None: the
            trainer's.
        val_loader: validation data. None: the trainer's; of several loaders the first.
        test_loader: what is scored. None: the validation data.
        options: any other argument of `SubspaceLaplace`, such as `dim`, `forward` and `labels_key`.
    """

    def __init__(
        self,
        likelihood: str | Likelihood,
        *,
        network: Callable[[LightningModule], nn.Module] | None = None,
        train_loader: Iterable[Any] | None = None,
        val_loader: Iterable[Any] | None = None,
        test_loader: Iterable[Any] | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        self._network = network
        self._train_loader, self._val_loader, self._test_loader = train_loader, val_loader, test_loader
        self._after = AfterTraining(likelihood, options)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Check the options before the training."""
        self._after.check(self._network_of(pl_module))

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Fit the posterior, tune it and log its scores."""
        train_loader: Any = trainer.train_dataloader if self._train_loader is None else self._train_loader
        self._after.fit(
            self._network_of(pl_module),
            train_loader,
            _first(trainer.val_dataloaders) if self._val_loader is None else self._val_loader,
            self._test_loader,
            "Give trainer.fit(…, val_dataloaders=…), or the callback a val_loader.",
        )
        if self.metrics:
            for logger in trainer.loggers:
                logger.log_metrics(self.metrics, step=trainer.global_step)

    def _network_of(self, module: LightningModule) -> nn.Module:
        # A shallow copy shares all parameters, but not the trainer's entries in the module, which change all the time.
        return copy.copy(module) if self._network is None else self._network(module)


def _first(loaders: Any) -> Iterable[Any] | None:
    """Return the only loader, the first of several, or None."""
    if isinstance(loaders, Sequence):
        return loaders[0] if loaders else None
    found: Iterable[Any] | None = loaders
    return found
