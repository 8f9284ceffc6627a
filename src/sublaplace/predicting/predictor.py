"""Passes over inputs that give what a fitted posterior predicts for them."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten

from sublaplace.data.batches import input_batches, num_inputs, plain
from sublaplace.data.loaders import with_labels_under
from sublaplace.data.subspace_inputs import joined_inputs
from sublaplace.fitting.fitted import Fitted
from sublaplace.jacobians.jacobian import Jacobian, Jacobians
from sublaplace.jacobians.wanted import ROWS, Wanted
from sublaplace.model.likelihoods.links import WITH_MATRICES, Covariance
from sublaplace.model.output_layout import OutputLayout
from sublaplace.model.prediction import Prediction
from sublaplace.posteriors.drawn import DrawnPosterior
from sublaplace.posteriors.subspace import SubspacePosterior
from sublaplace.predicting.arrangement import jointly_arranged, require_one_layout
from sublaplace.predicting.chosen_outputs import checked_outputs, chosen_rows
from sublaplace.runtime.memory import require
from sublaplace.runtime.progress import input_bar

_LARGEST_GROUP = 8  # inputs whose joint covariance is that of one input with more outputs


@dataclass(frozen=True)
class Predictor:
    """A fitted posterior with what it takes to predict."""

    fitted: Fitted
    labels_key: str  # of labels in mappings, which are ignored
    seed: int  # of Monte Carlo draws
    claimed: Callable[[], AbstractContextManager[None]]  # keeps other threads off the model

    @property
    def _factored(self) -> SubspacePosterior | DrawnPosterior:
        """What predicts, which must have a factor of its covariances."""
        predictive = self.fitted.predictive
        assert isinstance(predictive, SubspacePosterior | DrawnPosterior)
        return predictive

    def prediction(self, x: Any, link: str, samples: int = 1000, progress: bool = False) -> Prediction:
        """Return the prediction; see `SubspaceLaplace.predict`."""
        fitted = self.fitted
        likelihood, predictive = fitted.survey.likelihood, fitted.predictive
        has_positions = fitted.survey.layout is not None
        C = fitted.survey.num_outputs
        # With positions, the covariance within each of them comes from the factor of all outputs.
        has_factor = isinstance(predictive, SubspacePosterior | DrawnPosterior)
        low_rank = has_factor and (self._factored.rank < C or has_positions)
        sampled = link in WITH_MATRICES and likelihood.has_probabilities
        whole = "blocks" if has_positions else "matrix"
        form = "factor" if low_rank and sampled else whole if sampled or C == 1 else "variance"
        if isinstance(x, Iterator) and form == "variance":
            form = "factor" if low_rank else whole  # x cannot be read again for covariances
        means, found = self.passed(x, form, progress)
        layout = fitted.linearization.output_layout

        def passed_later(form: str) -> Tensor:
            with self.claimed():
                return self.passed(x, form)[1]

        def factors() -> Tensor:
            return likelihood.by_position(passed_later("factor"))

        if form in ("matrix", "blocks"):
            uncertainty = Covariance.of(found)
        elif form == "factor":
            rows = likelihood.by_position(found)
            uncertainty = Covariance(rows.square().sum(2), lambda: rows @ rows.mT, lambda: rows)
        else:
            variance, one_each = likelihood.by_position(found), has_positions and likelihood.class_dim is None

            def matrices() -> Tensor:
                if one_each:
                    return variance[:, :, None]
                return _gram(factors()) if low_rank and has_positions else passed_later(whole)

            roots: Callable[[], Tensor] | None = factors if low_rank else None
            uncertainty = Covariance(variance, matrices, (lambda: variance.sqrt()[:, :, None]) if one_each else roots)
        single = likelihood.of_one_position
        return Prediction(likelihood.by_position(means), single, uncertainty, link, samples, self.seed, layout)

    def passed(self, x: Any, form: str, progress: bool = False, outputs: Any = None) -> tuple[Tensor, Tensor]:
        """Run one pass over x: the network's outputs, and their variances, covariances or factors of covariances.

        Args:
            x: the inputs.
            form: "variance" (n, K), "matrix" (n, K, K), "factor" (n, K, s) or "blocks", the covariances (n·L, C, C)
                within each position.
            progress: show a bar.
            outputs: which outputs, see `SubspaceLaplace.functional_variance`; None: all.
        """
        fitted, survey = self.fitted, self.fitted.survey
        likelihood = survey.likelihood
        # Rows of a few outputs cost little, so that nothing of them needs to be drawn.
        posterior = fitted.predictive if outputs is None else fitted.posterior
        chosen = None if outputs is None else checked_outputs(outputs, survey.num_outputs, survey.layout)
        self._require_room(x, form, chosen)
        found: list[tuple[Tensor, Tensor]] = []
        layouts: set[OutputLayout | None] = set()
        with fitted.linearization.borrowed():
            for jacobian in self.jacobians(x, progress, posterior.wanted, chosen):
                layouts.add(fitted.linearization.output_layout)
                if form == "factor":
                    spread = self._factored.whitened(jacobian).to(jacobian.outputs.dtype)
                else:
                    spread = posterior.variance(jacobian) if form == "variance" else posterior.covariance(jacobian)
                if form == "blocks":
                    spread = _diagonal_blocks(spread, likelihood.by_position(jacobian.outputs).shape[1])
                means = jacobian.outputs if chosen is None else jacobian.outputs.new_empty(len(spread), 0)
                found.append((means, spread))
                del jacobian, means  # or they would stand in memory beside the next ones
        require_one_layout(layouts)
        means, spreads = (torch.cat(parts) for parts in zip(*found, strict=True))
        return means, spreads

    def _require_room(self, x: Any, form: str, chosen: Tensor | None) -> None:
        """Raise MemoryError if the result of a pass does not fit; the length of a loader is not known."""
        if not isinstance(x, Tensor | Mapping):
            return
        linearization, survey = self.fitted.linearization, self.fitted.survey
        n, layout, C = num_inputs(x), survey.layout, survey.num_outputs
        if chosen is not None:
            C = chosen.shape[-1] * (1 if layout is None else layout.num_outputs // layout.num_classes)
        rank = self._factored.rank if form == "factor" else C
        sides = {"matrix": C, "factor": rank, "blocks": 1 if layout is None else layout.num_classes}
        if form != "variance":
            require(
                2 * n * C * sides[form] * linearization.dtype.itemsize,
                linearization.device,
                f"An array of covariances of {C:,} outputs for {n:,} inputs",
                "Give fewer inputs at once, choose outputs, as in functional_covariance(x, outputs=[0, 1]), or use "
                "functional_variance, which needs C numbers per input.",
            )
        if layout is not None:
            require(
                4 * n * C * linearization.dtype.itemsize,
                linearization.device,
                f"A prediction of {C:,} outputs for {n:,} inputs",
                "Give fewer inputs at once, or a few outputs, as in functional_variance(x, outputs=[0, 1]).",
            )

    def jacobians(
        self, x: Any, progress: bool = False, wanted: Wanted = ROWS, chosen: Tensor | None = None
    ) -> Iterator[Jacobian]:
        """Yield the Jacobians of all outputs, or of the chosen ones, (k,) or (n, k)."""
        linearization = self.fitted.linearization
        total = num_inputs(x) if isinstance(x, Tensor | Mapping) else None
        seen = 0
        with input_bar(total, "predictions", progress) as bar:
            for inputs in input_batches(with_labels_under(self.labels_key, x)):
                if num_inputs(inputs):
                    engine = linearization.differentiable() if requires_grad(inputs) else linearization
                    inputs = engine.to_device(inputs)
                    rows = None if chosen is None else chosen_rows(chosen, seen, inputs, linearization)
                    for jacobian in engine.chunks(inputs, rows, wanted):
                        yield jacobian
                        seen += jacobian.num_inputs
                        bar.update(jacobian.num_inputs)
        if not seen:
            raise ValueError("There are no inputs to predict for: x is empty.")

    def joint_covariance(self, x: Any) -> Tensor:
        """Return J Ψ Jᵀ over all inputs together, (nC, nC)."""
        given = joined_inputs(with_labels_under(self.labels_key, x), "x")
        linearization = self.fitted.linearization
        linearization = linearization.differentiable() if requires_grad(given) else linearization
        inputs = linearization.to_device(given)
        require_one_layout(linearization.output_layouts(inputs))
        rows = Jacobians(linearization, inputs).num_rows
        require(
            2 * 8 * rows**2,
            linearization.device,
            f"A joint covariance of {rows:,} outputs",
            "Give fewer inputs at once, or use joint=False.",
        )
        matrix = self.fitted.posterior.joint_covariance(Jacobians(linearization, inputs)).to(linearization.dtype)
        return jointly_arranged(linearization.output_layout, matrix, num_inputs(inputs))

    def groups(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the outputs of groups of inputs and their joint covariances; see `SubspaceLaplace.predict_groups`."""
        fitted = self.fitted
        if fitted.survey.layout is not None:
            raise ValueError("Groups of inputs are for outputs (n, C); outputs with positions have no groups.")
        if not isinstance(x, Tensor) or x.ndim < 3 or not x.shape[:2].numel():
            shape = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
            raise ValueError(f"Groups of inputs must be one tensor (b, q, …), b groups of q inputs; x is {shape}.")
        b, q, C = *x.shape[:2], fitted.survey.num_outputs
        linearization = fitted.linearization.differentiable() if requires_grad(x) else fitted.linearization
        require(
            2 * b * (q * C) ** 2 * linearization.dtype.itemsize,
            linearization.device,
            f"An array of joint covariances of {b:,} groups of {q * C:,} outputs",
            "Give fewer groups at once.",
        )
        if q == 1:
            means, covariances = self.passed(x.flatten(0, 1), "matrix")
        elif q <= _LARGEST_GROUP:
            engine, posterior = linearization.grouped(q), fitted.posterior
            with engine.borrowed():
                jacobians = engine.chunks(engine.to_device(x), wanted=posterior.wanted)
                found = [(jacobian.outputs, posterior.covariance(jacobian)) for jacobian in jacobians]
            means, covariances = (torch.cat(parts) for parts in zip(*found, strict=True))
        else:
            parts = [linearization.to_device(group) for group in x]
            joint = [fitted.posterior.joint_covariance(Jacobians(linearization, part)) for part in parts]
            covariances = torch.stack(joint).to(linearization.dtype)
            with linearization.borrowed():
                means = linearization.forward(linearization.model, linearization.to_device(x.flatten(0, 1)))
        return means.reshape(b, q, C), covariances.reshape(b, q * C, q * C)


def requires_grad(inputs: Any) -> bool:
    """Return whether predictions for these inputs are to be differentiated: gradients are enabled and asked for."""
    leaves = tree_flatten(plain(inputs))[0]
    return torch.is_grad_enabled() and any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in leaves)


def _diagonal_blocks(matrices: Tensor, size: int) -> Tensor:
    """Return the blocks on the diagonals of matrices (n, L·size, L·size): (n·L, size, size)."""
    blocks = matrices.unflatten(2, (-1, size)).unflatten(1, (-1, size)).diagonal(dim1=1, dim2=3)  # (n, size, size, L)
    return blocks.movedim(3, 1).flatten(0, 1)


def _gram(factor: Tensor) -> Tensor:
    return factor @ factor.mT
