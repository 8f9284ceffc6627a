"""The weight of the complement from subsamples of the data: against dense posteriors in float64, and its rules."""

import itertools
from math import log2
from types import SimpleNamespace

import pytest
import scipy.optimize
import torch
from dense_reference import dense_ggn, dense_jacobian, dense_outputs, pairwise_probabilities, softmax_hessians
from networks import make
from test_complement import dense_complemented
from test_laplace import labels, loader

from sublaplace import Categorical, Complement, Gaussian, Jacobians, Resources, SubspaceLaplace
from sublaplace.data.batches import Batch, select
from sublaplace.fitting import steps
from sublaplace.posteriors import binned_sweep, weighting

PRIOR, NOISE = 0.3, 0.4
KINDS = ["classification", "regression"]
NAMES = ["mlp", "paper-cnn", "embedding"]


class Setting:
    """A network, training data, and inputs X′ of which the last two are held back."""

    def __init__(self, name, kind, n=48):
        self.kind = kind
        self.model, inputs = make(name, n + 10)
        self.training, self.new = select(inputs, slice(0, n)), select(inputs, slice(n, n + 10))
        self.held_back = select(self.new, slice(8, 10))
        outputs = dense_outputs(self.model, self.training)
        generator = torch.Generator().manual_seed(5)
        if kind == "classification":
            self.likelihood, self.targets = Categorical(), labels(self.model, self.training)
        else:
            self.likelihood = Gaussian(NOISE)
            self.targets = outputs + NOISE * torch.randn(outputs.shape, generator=generator, dtype=torch.float64)

    def fit(self, weight="fitted", **options):
        options = {"dim": 4, "prior_precision": PRIOR, "subspace_inputs": self.new, **options}
        if weight != "fitted":
            options.pop("subspace_inputs" if options.get("projector", "") is None else "", None)
        la = SubspaceLaplace(self.model, self.likelihood, complement=Complement("kfac", weight), **options)
        return la.fit(loader(self.training, self.targets, 10))

    def ggn(self, which=slice(None), weights=None):
        inputs = select(self.training, which)
        outputs = dense_outputs(self.model, inputs)
        if self.kind == "classification":
            hessians = softmax_hessians(outputs)
        else:
            hessians = torch.eye(outputs.shape[1]).double().expand(len(outputs), -1, -1) / NOISE**2
        return dense_ggn(self.model, inputs, hessians if weights is None else weights[:, None, None] * hessians)

    def divergence(self, exact, approximation):
        """Σ KL of what is predicted for the inputs that were held back, with covariances of the parameters."""
        J, outputs = dense_jacobian(self.model, self.held_back), dense_outputs(self.model, self.held_back)
        C, total = outputs.shape[1], 0.0
        for i, f in enumerate(outputs):
            rows = J[i * C : (i + 1) * C]
            one, other = (rows @ psi @ rows.T for psi in (exact, approximation))
            if self.kind == "classification":
                p, q = (pairwise_probabilities(f[None], each.diagonal()[None])[0].log() for each in (one, other))
                total += float((p.exp() * (p - q)).sum())
            else:
                noise = NOISE**2 * torch.eye(C).double()
                gaussians = (
                    torch.distributions.MultivariateNormal(torch.zeros(C).double(), each + noise)
                    for each in (one, other)
                )
                total += float(torch.distributions.kl_divergence(*gaussians))
        return total


def curvature_outside(la):
    """K as a matrix, as it is with the weight 1."""
    outside, layout = la._state.posterior.outside.reweighted(1.0), la._layout
    identity = torch.eye(layout.num_parameters, dtype=torch.float64)
    psi = layout.flatten(outside.solve(layout.unflatten(identity.clone()))).T
    return torch.linalg.inv(psi) - outside.prior_precision * identity


def best_log_weight(setting, la, ggn, K):
    """The log₂ w of the smallest divergence to the exact posterior, by a grid and a bounded search."""
    identity = torch.eye(len(ggn), dtype=torch.float64)
    exact = torch.linalg.inv(ggn + PRIOR * identity)

    def divergence(log_weight):
        psi = torch.linalg.inv(2.0 ** float(log_weight) * K + PRIOR * identity)
        if la.dim:
            psi = dense_complemented(SimpleNamespace(ggn=ggn), la.projection_matrix(), psi, PRIOR)
        return setting.divergence(exact, psi)

    grid = [k / 2 for k in range(-40, 21)]
    start = min(grid, key=divergence)
    bounds = (max(start - 0.6, -20), min(start + 0.6, 10))
    found = scipy.optimize.minimize_scalar(divergence, bounds=bounds, method="bounded", options={"xatol": 1e-4})
    return float(found.x), divergence


@pytest.fixture
def own_bins(monkeypatch):
    """Every eigenvalue of KFAC in a bin of its own, so that nothing is rounded."""
    monkeypatch.setattr(binned_sweep, "BINS_PER_DECADE", 100)
    monkeypatch.setattr(binned_sweep, "_NEGLIGIBLE", 1e-15)
    used = itertools.count()
    monkeypatch.setattr(
        binned_sweep, "_bins", lambda eigenvalues, _, count: torch.tensor([next(used) % count for _ in eigenvalues])
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dim", [4, None])
@pytest.mark.parametrize("name", NAMES)
def test_a_fitted_weight_has_the_smallest_divergence_to_the_exact_posterior(name, dim, kind, own_bins):
    setting = Setting(name, kind)
    la = setting.fit(**({"dim": 4} if dim else {"dim": None, "projector": None}))
    expected, divergence = best_log_weight(setting, la, setting.ggn(), curvature_outside(la))
    assert -19 < expected < 9  # not at an end of the search
    assert log2(la.complement_weight) == pytest.approx(expected, abs=0.1)
    assert divergence(log2(la.complement_weight)) <= divergence(expected) + 0.02 * divergence(expected + 1)


@pytest.mark.parametrize("kind", KINDS)
def test_bins_move_the_weight_by_little(kind):
    setting = Setting("paper-cnn", kind)
    la = setting.fit()
    expected, divergence = best_log_weight(setting, la, setting.ggn(), curvature_outside(la))
    assert divergence(log2(la.complement_weight)) <= 1.1 * divergence(expected)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dim", [4, None])
def test_a_part_of_the_data_is_held_against_its_own_exact_posterior(dim, kind, weighted, own_bins):
    setting = Setting("mlp", kind, n=80)
    la = setting.fit(1.0, **({"dim": 4} if dim else {"dim": None, "projector": None}))
    state = la._state
    stream = steps.curvature_stream([], state.linearization, state.survey, 0.0)
    weights = torch.linspace(0.5, 1.5, 40, dtype=torch.float64) if weighted else None
    subsample = Batch(select(setting.training, slice(0, 40)), setting.targets[:40], weights)
    held_back = Jacobians(state.linearization, setting.held_back)
    found = weighting._log_weight_of(state.posterior, stream, 80, held_back, subsample, 36)
    # The first 36 of 40, with 36/80 of the curvature outside; in the subspace their own exact curvature.
    ggn = setting.ggn(slice(0, 36), None if weights is None else weights[:36])
    expected, divergence = best_log_weight(setting, la, ggn, curvature_outside(la) * 36 / 80)
    assert found == pytest.approx(expected, abs=0.1)
    assert divergence(found) <= divergence(expected) + 0.02 * divergence(expected + 1)


# Rules


def sizes_and_weight(monkeypatch, found, n, num_data, **resources):
    """The weight for subsamples that ask for `found`, and their sizes."""
    setting, sizes = Setting("mlp", "regression", n=n), []
    la = setting.fit(1.0, resources=Resources(**resources))
    state = la._state
    stream = steps.curvature_stream([], state.linearization, state.survey, 0.0)

    def log_weight(posterior, stream, num_data, held_back, subsample, size):
        sizes.append(size)
        return found[len(sizes) - 1]

    monkeypatch.setattr(weighting, "_log_weight_of", log_weight)
    held_back = Jacobians(state.linearization, setting.held_back)
    subsample = Batch(setting.training, setting.targets, None)
    return sizes, weighting.fitted_weight(state.posterior, stream, num_data, held_back, subsample)


@pytest.mark.parametrize(
    ("half", "all_of_it", "expected"),
    [
        (-6.0, -5.0, -3.0),  # one more a doubling, two doublings
        (-5.5, -5.0, -4.0),
        (-4.0, -5.0, -5.0),  # it does not fall with more data
        (-9.0, -5.0, -3.0),  # nor rise faster than the data
        (-2.0, -1.0, 0.0),  # and is not extrapolated above 1
        (1.0, 2.0, 2.0),  # where it lies above already, it stays
    ],
)
def test_two_nested_subsamples_are_extrapolated_within_limits(half, all_of_it, expected, monkeypatch):
    sizes, weight = sizes_and_weight(monkeypatch, [half, all_of_it], n=64, num_data=256)
    assert sizes == [32, 64]
    assert log2(weight) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(("num_data", "expected"), [(60, [60]), (64, [60]), (65, [30, 60]), (600, [30, 60])])
def test_nearly_all_data_need_no_extrapolation(num_data, expected, monkeypatch):
    sizes, weight = sizes_and_weight(monkeypatch, [-3.0, -3.0], n=60, num_data=num_data)
    assert sizes == expected and weight == 2.0**-3


def test_a_thousand_inputs_are_enough(monkeypatch):
    monkeypatch.setattr(weighting, "SUBSAMPLE", 40)
    sizes, _ = sizes_and_weight(monkeypatch, [-3.0, -3.0], n=60, num_data=60)
    assert sizes == [20, 40]


@pytest.mark.parametrize(("rows", "expected"), [(50, [25, 50]), (32, [16, 32]), (31, [])])
def test_the_memory_budget_limits_the_subsample(rows, expected, monkeypatch):
    p, C = 71, 2
    budget = rows * 3 * 8 * p * C
    sizes, weight = sizes_and_weight(monkeypatch, [-3.0, -3.0], n=60, num_data=600, memory_budget=budget)
    assert sizes == expected
    assert weight == (2.0**-3 if expected else 1.0)


@pytest.mark.parametrize("kind", KINDS)
def test_fewer_than_32_inputs_leave_the_weight_at_one(kind, monkeypatch):
    assert Setting("mlp", kind, n=32).fit().complement_weight != 1.0
    monkeypatch.setattr(weighting, "exact_ggn", lambda *_: pytest.fail("there is nothing to compare with"))
    assert Setting("mlp", kind, n=31).fit().complement_weight == 1.0


def test_inputs_that_were_held_back_are_not_in_the_subsample(monkeypatch):
    setting, seen = Setting("mlp", "regression", n=60), []

    def spy(posterior, stream, num_data, held_back, subsample):
        seen.append((held_back.inputs, subsample))
        return 0.5

    monkeypatch.setattr("sublaplace.fitting.run.fitted_weight", spy)
    la = setting.fit(subspace_inputs=None)
    assert la.complement_weight == 0.5
    held_back, subsample = seen[0]
    both = torch.cat([held_back, subsample.inputs])
    assert len(both) == 60 and len(torch.unique(both, dim=0)) == 60
    # Every input with its own target.
    for one, target in zip(subsample.inputs, subsample.targets, strict=True):
        (place,) = torch.nonzero((setting.training == one).all(1))[:, 0].tolist()
        assert torch.equal(setting.targets[place], target)


def test_inputs_that_do_not_count_change_nothing():
    setting = Setting("mlp", "classification", n=60)
    setting.likelihood = Categorical(ignore_index=-1)
    expected = setting.fit()
    more = select(setting.training, slice(0, 40)) + 0.1
    setting.training = torch.cat([setting.training, more])
    setting.targets = torch.cat([setting.targets, torch.full((40,), -1)])
    found = setting.fit()
    assert found.complement_weight == pytest.approx(expected.complement_weight, rel=1e-6)


def test_the_weight_survives_changes_of_the_posterior():
    setting = Setting("mlp", "regression")
    la = setting.fit()
    assert la.complement_weight != 1.0
    assert la.with_prior(3.0).complement_weight == la.truncated(2).complement_weight == la.complement_weight
