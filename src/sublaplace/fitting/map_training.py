r"""Training to the maximum a posteriori (MAP) that a Laplace approximation needs, with λ and σ by the evidence.

With the prior N(0, λ⁻¹ I) and N data, θ̂ minimises :math:`\frac1N \sum_i -\ln p(y_i|f_\theta(x_i)) + \frac{λ}{2N}‖θ‖²`.
Unless given, λ and the noise σ maximise the evidence of the KFAC approximation at the current network. They are updated
several times in the first half of the training (Immer et al., 2021).
"""

import copy
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from math import isfinite
from typing import Any

import torch
from torch import Tensor, nn

from sublaplace.data.batches import batches
from sublaplace.data.loaders import checked_loader, with_labels_under
from sublaplace.fitting.fit import new_linearization
from sublaplace.fitting.survey import Survey, survey_of
from sublaplace.fitting.training_evidence import first_likelihood, first_prior, spread_of, tune
from sublaplace.fitting.training_recipe import OptimizerFactory, Recipe, Training, optimizer_factory, training_options
from sublaplace.fitting.validation import check_first_batch
from sublaplace.jacobians.network import Forward, Network
from sublaplace.model.borrowing import claimed, full_precision
from sublaplace.model.calling import call_model
from sublaplace.model.layer_priors import PriorPrecision
from sublaplace.model.likelihoods.at_positions import at_positions
from sublaplace.model.likelihoods.base import Likelihood, Noise
from sublaplace.model.output_layout import FlatOutputs
from sublaplace.model.parameters import HALF_PRECISIONS, ParameterLayout
from sublaplace.options import EVIDENCE, Resources
from sublaplace.runtime.checks import checked_count
from sublaplace.runtime.progress import shown


def train(
    model: nn.Module,
    loader: Iterable[Any],
    likelihood: str | Likelihood,
    *,
    epochs: int = 100,
    learning_rate: float | None = None,
    optimizer: OptimizerFactory | None = None,
    prior_precision: float | dict[str, float] | str = EVIDENCE,
    prior_structure: str = "scalar",
    val_loader: Iterable[Any] | None = None,
    evidence_loader: Iterable[Any] | None = None,
    forward: Forward | None = None,
    labels_key: str = "labels",
    seed: int = 0,
    resources: Resources | None = None,
    progress: bool = False,
) -> Training:
    """Train a network in place to its MAP, with λ and σ by the evidence of KFAC, and leave it in eval mode.

    The second half of the training uses the returned λ and σ, so θ̂ is their MAP. The learning rate decays to zero
    along a cosine. Continue with
    ``SubspaceLaplace(model, result.likelihood, prior_precision=result.prior_precision).fit(loader)``. If anything
    fails, the model is as before; an interrupt leaves it as it is then.

    Cost: `epochs` passes over the data, one forward pass before, and at most ten fits of KFAC if λ or σ is tuned.
    Memory: a copy of the model, besides gradients, the optimizer's state and KFAC.

    Args:
        model: any module that `SubspaceLaplace` accepts; parameters with ``requires_grad=True`` are trained.
        loader: a re-iterable of batches, as for `SubspaceLaplace.fit`; sample weights count as there.
        likelihood: a name or an object, as for `SubspaceLaplace`. A given σ, ``Gaussian(0.1)``, is kept.
        epochs: passes over the data.
        learning_rate: the first learning rate of Adam; None: 0.001.
        optimizer: a function from the list of parameters to an optimizer, such as
            ``partial(torch.optim.SGD, lr=0.1)``, in place of Adam. Its weight decay must be zero: λ stands for it.
        prior_precision: λ > 0 to keep, one number or one for each parameter by name; "evidence": tuned.
        prior_structure: "scalar", or "layer": one λ per layer, all tuned by the evidence.
        val_loader: validation data whose NLL is recorded after each epoch; they decide nothing.
        evidence_loader: the training data as the evidence is to see them, for example without random augmentation or in
            larger batches; None: `loader`.
        forward: how the model is called, as for `SubspaceLaplace`.
        labels_key: where a batch that is a mapping holds its targets.
        seed: of dropout and of the order of a `DataLoader` without a generator of its own. The global random state
            is the same afterwards.
        resources: what the fits of KFAC may use, see `Resources`.
        progress: show a bar.

    Raises:
        ValueError: for arguments or data that do not fit, or if the objective is no longer finite.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, not {type(model).__name__}.")
    if isinstance(prior_precision, str) and prior_precision != EVIDENCE:
        raise ValueError(f"Unknown prior_precision '{prior_precision}'; give a positive number or '{EVIDENCE}'.")
    options = training_options(likelihood, prior_precision, prior_structure, seed, resources, labels_key)
    recipe = Recipe(
        options,
        checked_count(epochs, "epochs"),
        optimizer_factory(optimizer, learning_rate),
        forward or call_model,
        progress,
    )
    if recipe.tunes and recipe.epochs < 2:
        raise ValueError(
            "λ and σ are tuned between epochs, so epochs must be at least 2. Give prior_precision=…, and for "
            "regression Gaussian(σ), to train for a single one."
        )
    _require_trainable(model)
    device = next(model.parameters()).device
    modes = [(module, module.training) for module in model.modules()]
    before = copy.deepcopy(model.state_dict())
    drawing = [device] if device.type == "cuda" else []
    with claimed(model), full_precision(device), torch.enable_grad(), torch.random.fork_rng(drawing):
        torch.manual_seed(seed)
        read = partial(_checked, labels_key)
        data = read("train", loader)
        seen = data if evidence_loader is None else read("evidence_loader", evidence_loader)
        held_out = None if val_loader is None else read("val_loader", val_loader)
        try:
            survey = _survey(model, seen, recipe, held_out)
            return trained(model, data, seen, survey.num_data, recipe, spread_of(survey), held_out)
        except Exception:
            model.load_state_dict(before)
            for module, training in modes:
                module.training = training
            raise
        finally:
            model.zero_grad()


def _require_trainable(model: nn.Module) -> None:
    """Raise ValueError for parameters in half precision, in which small steps are lost."""
    for name, p in model.named_parameters():
        if p.requires_grad and p.dtype in HALF_PRECISIONS:
            raise ValueError(
                f"Parameter '{name}' is {p.dtype}, in which small steps are rounded away. Train in float32: convert "
                "the trainable parameters with .float()."
            )


def _checked(labels_key: str, name: str, loader: Any) -> Iterable[Any]:
    return with_labels_under(labels_key, checked_loader(loader, name))


def _flat(recipe: Recipe) -> Forward:
    """Return how the model is called for flat outputs, as likelihoods take them."""
    likelihood = recipe.options.likelihood
    return FlatOutputs(recipe.forward, likelihood.class_dim) if likelihood.takes_positions else recipe.forward


def _survey(model: nn.Module, loader: Iterable[Any], recipe: Recipe, val_loader: Iterable[Any] | None) -> Survey:
    """Look at the data with the untrained network: how many there are, and whether they fit."""
    options = recipe.options
    linearization = new_linearization(options, model, recipe.forward, options.resources.memory_budget)
    units = options.given_units(linearization.layout)  # refuses unknown names
    linearization = linearization if units is None else linearization.with_units(units)
    with linearization.borrowed():
        if val_loader is not None:
            check_first_batch(val_loader, linearization, options.likelihood)
        return survey_of(loader, linearization, options.likelihood, estimate=False)[0]


def trained(
    model: nn.Module,
    loader: Iterable[Any],
    evidence_loader: Iterable[Any],
    num_data: int,
    recipe: Recipe,
    spread: Noise = 1.0,
    val_loader: Iterable[Any] | None = None,
) -> Training:
    """Train the network in place, and leave it in eval mode; see `train`.

    Args:
        model: trained in place.
        loader: the data in the order of the steps.
        evidence_loader: the same data as the evidence sees them.
        num_data: N.
        recipe: how it is trained.
        spread: the standard deviation of the targets, in which σ is searched for; one for each output if σ is.
        val_loader: validation data.
    """
    layout = ParameterLayout.of(model)
    parameters = layout.parameters(model)
    step = _Step(Network(model, _flat(recipe)))
    result = Training(first_prior(recipe, spread), first_likelihood(recipe, spread))
    optimizer = recipe.optimizer(list(parameters.values()))
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, recipe.epochs)
    for epoch in shown(range(recipe.epochs), "training", recipe.progress):
        if epoch in recipe.tuned_at:
            tune(result, model, evidence_loader, recipe, spread)
        priors = _by_name(result.prior_precision, layout)
        model.train()
        total, count = 0.0, 0
        for inputs, targets, weights in batches(loader):
            optimizer.zero_grad()
            loss = -step.log_likelihood(result.likelihood, inputs, targets, weights) / len(targets)
            loss.backward()
            _add_prior_gradient(parameters, priors, num_data)
            optimizer.step()
            total += _finite(loss.item(), epoch) * len(targets)
            count += len(targets)
        cosine.step()
        penalty = sum(priors[name] * p.detach().square().sum().item() for name, p in parameters.items())
        result.objective.append((total * (num_data / count) + 0.5 * penalty) / num_data)
        model.eval()
        if val_loader is not None:
            result.validation_nll.append(step.mean_nll(result.likelihood, val_loader))
    return result


@dataclass(frozen=True)
class _Step:
    """The log likelihood of batches, for gradients."""

    network: Network

    def log_likelihood(self, likelihood: Likelihood, inputs: Any, targets: Tensor, weights: Tensor | None) -> Tensor:
        """Return Σ w ln p(y|f) over a batch, differentiable."""
        network = self.network
        outputs = network.forward(network.model, network.to_device(inputs))
        forward = network.forward
        placed = at_positions(likelihood, forward.layout if isinstance(forward, FlatOutputs) else None)
        labels = placed.targets_by_position(targets.to(network.device))
        each = placed.of_one_position.log_density(placed.by_position(outputs), labels)
        if weights is None:
            return each.sum()
        own = placed.spread_weights(weights.to(network.device))
        return (each * placed.counts_by_position(own, outputs).to(each)).sum()

    def mean_nll(self, likelihood: Likelihood, loader: Iterable[Any]) -> float:
        """Return the mean of −ln p(y|f) per input."""
        total, count = 0.0, 0
        with torch.no_grad():
            for inputs, targets, weights in batches(loader):
                total -= float(self.log_likelihood(likelihood, inputs, targets, weights))
                count += len(targets)
        return total / count


def _add_prior_gradient(parameters: dict[str, nn.Parameter], priors: dict[str, float], num_data: int) -> None:
    """Add λθ/N to the gradients; a parameter that the batch does not use stays as it is."""
    with torch.no_grad():
        for name, p in parameters.items():
            if p.grad is not None:
                p.grad = p.grad.to_dense() if p.grad.is_sparse else p.grad
                p.grad.add_(p, alpha=priors[name] / num_data)


def _finite(loss: float, epoch: int) -> float:
    if not isfinite(loss):
        raise ValueError(
            f"The objective is {loss} in epoch {epoch + 1}, so the training diverged. Use a smaller learning rate, or "
            "standardise inputs and targets."
        )
    return loss


def _by_name(prior: PriorPrecision, layout: ParameterLayout) -> dict[str, float]:
    return prior if isinstance(prior, dict) else dict.fromkeys(layout.names, prior)
