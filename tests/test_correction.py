"""The subspace of what KFAC gets wrong: against brute force in float64 on every network."""

from math import pi

import pytest
import torch
from dense_reference import dense_jacobian
from networks import pairs
from scipy.linalg import eigh
from test_complement import KFAC, KINDS, NOISE, Problem, close, dense_outside
from test_laplace import loader

from sublaplace import Gaussian, SubspaceLaplace
from sublaplace.data.batches import select

DIM = 5


class Corrected(Problem):
    """Beside the dense matrices, Σ and KFAC's Σ_K of the first training inputs."""

    def __init__(self, name, kind):
        super().__init__(name, kind)
        self.chosen = select(self.training, slice(0, 4))
        self.rows = dense_jacobian(self.model, self.chosen)
        self.exact = self.rows @ torch.linalg.solve(self.precision, self.rows.T)
        self.kfac = self.rows @ dense_outside(self, "kfac") @ self.rows.T
        self.noise = NOISE**2 if kind == "regression" else 8 / pi

    def fit(self, **options):
        if options.get("projector", "") is None:  # as of `fit_outside`: there are no subspace inputs
            return super().fit(**options)
        return super().fit(**{"subspace_inputs": self.chosen, "complement": KFAC, **options})

    def mistakes(self):
        """The divergences along the generalised eigenvectors, descending, and these."""
        noise = self.noise * torch.eye(len(self.exact)).double()
        ratios, vectors = eigh((self.kfac + noise).numpy(), (self.exact + noise).numpy())
        ratios, vectors = torch.from_numpy(ratios), torch.from_numpy(vectors)
        divergences = (1 / ratios - 1 + ratios.log()) / 2
        order = divergences.argsort(descending=True)
        return divergences[order], vectors[:, order]


@pytest.mark.parametrize(("name", "kind"), pairs(KINDS))
def test_the_subspace_is_that_of_the_directions_with_the_largest_divergences(name, kind):
    problem = Corrected(name, kind)
    divergences, vectors = problem.mistakes()
    dim = next(s for s in range(DIM, 0, -1) if divergences[s - 1] > 1.01 * divergences[s] and divergences[s - 1] > 1e-6)
    Q = problem.fit(projector="lowrank-correction", dim=dim).projection_matrix().double()
    P = torch.linalg.solve(problem.precision, problem.rows.T @ vectors[:, :dim])
    expected, _ = torch.linalg.qr(P)
    assert close(Q @ Q.T, expected @ expected.T, 1e-5)


@pytest.mark.parametrize(("name", "kind"), pairs(KINDS))
def test_the_posterior_is_exact_along_these_directions(name, kind):
    problem = Corrected(name, kind)
    _, vectors = problem.mistakes()
    la = problem.fit(projector="lowrank-correction", dim=3)
    corrected = la.functional_covariance(problem.chosen, joint=True).double()
    assert close(corrected @ vectors[:, :3], problem.exact @ vectors[:, :3])
    assert not close(problem.kfac @ vectors[:, :3], problem.exact @ vectors[:, :3], 1e-3)


def test_with_all_directions_the_subspace_inputs_have_the_exact_covariance():
    problem = Corrected("mlp", "regression")
    with pytest.warns(UserWarning, match="above the numerical rank"):
        la = problem.fit(projector="lowrank-correction", dim=200)
    assert close(la.functional_covariance(problem.chosen, joint=True).double(), problem.exact)


def test_where_kfac_is_right_the_variance_decides():
    # KFAC of a single layer is exact in regression, so that no direction is mistaken.
    torch.manual_seed(0)
    inputs = torch.randn(30, 4, dtype=torch.float64)
    model = torch.nn.Linear(4, 1, bias=False).double()
    options = {"prior_precision": 1.0, "dim": 3, "complement": KFAC}
    batches = loader(inputs, model(inputs).detach() + torch.randn(30, 1).double(), 10)
    la = SubspaceLaplace(model, Gaussian(0.5), projector="lowrank-correction", **options).fit(batches)
    full = SubspaceLaplace.paper(model, Gaussian(0.5), projector="full", prior_precision=1.0).fit(batches)
    assert la.dim == 3
    assert close(la.functional_covariance(inputs), full.functional_covariance(inputs))
