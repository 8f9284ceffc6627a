"""A callback for the `Trainer` of Hugging Face that gives the trained network a posterior.

Install with ``pip install 'sublaplace[huggingface]'``.
"""

from collections.abc import Iterable
from typing import Any

from sublaplace.after_training import AfterTraining, Results
from sublaplace.model.likelihoods.base import Likelihood

try:
    from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
except ImportError as error:
    raise ImportError("sublaplace.transformers needs transformers: pip install 'sublaplace[huggingface]'.") from error


class SubspaceLaplaceCallback(Results, TrainerCallback):
    """A callback that fits `SubspaceLaplace` at the end of the training, and logs its scores.

    λ (and σ) are tuned on the data that the trainer evaluated. The scores of the plain network and of the posterior,
    such as "plain/nll" and "posterior/ece", are the last entry of ``trainer.state.log_history``. They are those of the
    validation data, unless other data are given; λ was tuned on these, so the posterior's are slightly optimistic.
    Cost: one fit, see `SubspaceLaplace`.

    Args:
        likelihood: as of `SubspaceLaplace`.
        train_loader: the training data as the fit is to see them. None: the trainer's.
        val_loader: validation data, such as ``trainer.get_eval_dataloader()``. None: those that the trainer evaluated
            during the training; it has none with ``eval_strategy="no"``.
        test_loader: what is scored. None: the validation data.
        options: any other argument of `SubspaceLaplace`, such as `dim` and `forward`.
    """

    def __init__(
        self,
        likelihood: str | Likelihood,
        *,
        train_loader: Iterable[Any] | None = None,
        val_loader: Iterable[Any] | None = None,
        test_loader: Iterable[Any] | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        self._train_loader, self._val_loader, self._test_loader = train_loader, val_loader, test_loader
        self._after = AfterTraining(likelihood, options)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Check the options before the training."""
        self._after.check(kwargs["model"])

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Fit the posterior, tune it and log its scores."""
        self._after.fit(
            kwargs["model"],
            kwargs["train_dataloader"] if self._train_loader is None else self._train_loader,
            kwargs["eval_dataloader"] if self._val_loader is None else self._val_loader,
            self._test_loader,
            "Give the trainer an eval_dataset and eval_strategy='epoch', or the callback a val_loader.",
        )
        if self.metrics:
            state.log_history.append({**self.metrics, "epoch": state.epoch, "step": state.global_step})
