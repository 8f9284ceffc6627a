"""sublaplace's own methods, by its public interface alone."""

from torch import Tensor, nn

from experiments.calibration.prediction import Normal, Predicted, Probabilities
from experiments.calibration.problem import Examples, Problem
from sublaplace import SubspaceLaplace

DIM = 100


def paper(problem: Problem) -> Predicted:
    """Predicts with the paper's posterior and λ = 1."""
    la = SubspaceLaplace(problem.network, problem.task, dim=_dim(problem.network), prior_precision=1.0)
    return _predicted(la.fit(problem.train.loader()), problem.test)


def paper_with_evidence(problem: Problem) -> Predicted:
    """Predicts with the paper's posterior, λ by the evidence."""
    la = SubspaceLaplace(problem.network, problem.task, dim=_dim(problem.network))
    la.fit(problem.train.loader()).optimize_prior_precision("marglik")
    return _predicted(la, problem.test)


def default(problem: Problem) -> Predicted:
    """Predicts with all defaults, without validation data."""
    outside = {"complement": "kfac", "complement_weight": "fitted"} if problem.task == "regression" else {}
    la = SubspaceLaplace(problem.network, problem.task, prior_precision="marglik", **outside)  # type: ignore[arg-type]
    return _predicted(la.fit(problem.train.loader()), problem.test)


def default_with_validation(problem: Problem) -> Predicted:
    """Predicts with all defaults, λ and σ tuned on the validation data."""
    la = SubspaceLaplace(
        problem.held_out_network,
        problem.task,
        prior_precision="marglik",
        complement="kfac",
        complement_weight="fitted",
    )
    la.fit(problem.fit.loader()).optimize_prior_precision("validation", problem.validation.loader())
    return _predicted(la, problem.test)


def _dim(network: nn.Module) -> int:
    return min(DIM, sum(parameter.numel() for parameter in network.parameters() if parameter.requires_grad))


def _predicted(la: SubspaceLaplace, test: Examples) -> Predicted:
    prediction = la.predict(test.inputs)
    note = f"λ={la.prior_precision:.3g}"
    if prediction.probabilities is not None:
        return Probabilities(prediction.probabilities.double(), note)
    assert isinstance(prediction.total, Tensor)
    return Normal(prediction.mean.double(), prediction.total.double(), f"{note}, σ={la.noise_std:.3g}")
