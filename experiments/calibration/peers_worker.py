"""The process that runs laplace-torch. Started by `peers`, in the environment of the peers."""

import contextlib
import math
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from laplace import Laplace  # type: ignore[import-not-found]
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from experiments.calibration.networks import BUILDERS

FIT_BATCH = 100
JACOBIAN_BATCH = 10  # about the fastest: the Jacobian of an input costs twice as much in a batch of 100
MARGLIK_STEPS = 1000  # Adam, 0.1, as in the library's example of regression
GRID_SIZE = 21  # from 1e-4 to 1e4, the library's own ends; its 100 points would take five times as long


def main() -> None:
    """Answer requests: a line of standard input names two files, a line of standard output says how it went."""
    torch.set_num_threads(1)
    answers = sys.stdout
    for line in sys.stdin:
        asked, answered = line.rstrip("\n").split("\t")
        torch.manual_seed(0)
        try:
            with contextlib.redirect_stdout(sys.stderr):
                torch.save(_answer(torch.load(asked, weights_only=True)), answered)
            outcome = "done"
        except Exception:
            outcome = traceback.format_exc().replace("\n", " | ")
        print(outcome, file=answers, flush=True)


def _answer(request: dict[str, Any]) -> dict[str, Any]:
    builder, sizes, weights = request["network"]
    network = BUILDERS[builder](**sizes)
    network.load_state_dict(weights)
    network.eval()
    start = time.process_time()
    la = Laplace(network, request["task"], subset_of_weights=request["weights"], hessian_structure="kron")
    la.fit(DataLoader(TensorDataset(*request["train"]), FIT_BATCH))
    is_regression = request["task"] == "regression"
    if is_regression:
        _tune_prior_and_noise(la)
    if request["validation"] is not None:
        loader = DataLoader(TensorDataset(*request["validation"]), JACOBIAN_BATCH)
        loss = _gaussian_nll(float(la.sigma_noise)) if is_regression else _categorical_nll
        la.optimize_prior_precision(
            method="gridsearch", pred_type="glm", val_loader=loader, loss=loss, grid_size=GRID_SIZE
        )
    elif not is_regression:
        la.optimize_prior_precision(method="marglik", pred_type="glm")
    note = f"λ={float(la.prior_precision.mean()):.3g}"
    with torch.no_grad():
        if not is_regression:
            batches = request["test"].split(JACOBIAN_BATCH)
            found = torch.cat([la(batch, pred_type="glm", link_approx="probit") for batch in batches])
            return {"probabilities": found, "seconds": time.process_time() - start, "note": note}
        means, covariances = zip(*(la(batch) for batch in request["test"].split(JACOBIAN_BATCH)), strict=True)
    mean, covariance = torch.cat(means), torch.cat(covariances)
    total = covariance.double() + float(la.sigma_noise) ** 2 * torch.eye(mean.shape[1], dtype=torch.float64)
    note += f", σ={float(la.sigma_noise):.3g}"
    return {"mean": mean, "covariance": total, "seconds": time.process_time() - start, "note": note}


def _tune_prior_and_noise(la: Any) -> None:
    """Maximise the marginal likelihood over λ and σ as the library's own example does."""
    log_prior, log_noise = torch.ones(1, requires_grad=True), torch.ones(1, requires_grad=True)
    optimizer = torch.optim.Adam([log_prior, log_noise], lr=0.1)
    for _ in range(MARGLIK_STEPS):
        optimizer.zero_grad()
        (-la.log_marginal_likelihood(log_prior.exp(), log_noise.exp())).backward()
        optimizer.step()
    la.prior_precision, la.sigma_noise = log_prior.exp().detach(), log_noise.exp().detach()


def _categorical_nll(probabilities: Tensor, targets: Tensor) -> Tensor:
    """Return the NLL. The library's own running metric sums it over all λ so far, so that the largest λ wins."""
    return F.nll_loss(probabilities.log(), targets)


def _gaussian_nll(noise_std: float) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Make the NLL at a given σ. The library's own loss for regression is blind to the variance."""

    def nll(mean: Tensor, covariance: Tensor, targets: Tensor) -> Tensor:
        total = covariance.double() + noise_std**2 * torch.eye(mean.shape[1], dtype=torch.float64)
        residuals = (targets - mean).double()
        squares = (residuals * torch.linalg.solve(total, residuals)).sum(1)
        return 0.5 * (squares + total.logdet() + mean.shape[1] * math.log(2 * math.pi)).mean()

    return nll


if __name__ == "__main__":
    main()
