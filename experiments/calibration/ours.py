"""sublaplace's own methods, by its public interface alone."""

from experiments.calibration.prediction import Normal, Predicted, Probabilities
from experiments.calibration.problem import Examples, Problem
from sublaplace import SubspaceLaplace

PAPER_DIM = 100


def paper(problem: Problem) -> Predicted:
    """Predict with the paper's posterior and λ = 1."""
    la = SubspaceLaplace.paper(problem.network, problem.task, PAPER_DIM, prior_precision=1.0)
    return _predicted(la.fit(problem.train.loader()), problem.test)


def paper_with_evidence(problem: Problem) -> Predicted:
    """Predict with the paper's posterior, λ by the evidence."""
    la = SubspaceLaplace.paper(problem.network, problem.task, PAPER_DIM, prior_precision="evidence")
    return _predicted(la.fit(problem.train.loader()), problem.test)


def default(problem: Problem) -> Predicted:
    """Predict with all defaults, without validation data."""
    la = SubspaceLaplace(problem.network, problem.task)
    return _predicted(la.fit(problem.train.loader()), problem.test)


def default_with_validation(problem: Problem) -> Predicted:
    """Predict with all defaults and validation data."""
    la = SubspaceLaplace(problem.held_out_network, problem.task)
    return _predicted(la.fit(problem.fit.loader(), problem.validation.loader()), problem.test)


def _predicted(la: SubspaceLaplace, test: Examples) -> Predicted:
    prediction = la.predict(test.inputs)
    note = f"λ={la.prior_precision:.3g}"
    if prediction.has_probabilities:
        return Probabilities(prediction.probabilities.double(), note)
    return Normal(prediction.mean.double(), prediction.total.double(), f"{note}, σ={la.noise_std:.3g}")
