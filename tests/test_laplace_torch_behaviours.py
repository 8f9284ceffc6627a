"""The behaviours that laplace-torch's own tests check, in our interface.

Numbers are those of the table in docs/coming_from_laplace_torch.md. Every behaviour that it says we have, also in
another form, has a test here, and no other one has.
"""

import re
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributions import MultivariateNormal, Normal
from torch.func import functional_call, jacrev
from torch.utils.data import DataLoader, TensorDataset

from sublaplace import Categorical, Complement, Gaussian, Subset, SubspaceLaplace

TABLE = Path(__file__).parent.parent / "docs" / "coming_from_laplace_torch.md"
COVERED = set()

FLAVOURS = {
    "full": {"projector": "full"},
    "kron": {"projector": None, "complement": Complement("kfac", weight=1.0)},
    "diag": {"projector": None, "complement": Complement("diagonal", weight=1.0)},
    "last layer": {"projector": "last-layer"},
}
SUBSETS = ["subset-magnitude", "subset-diagonal", "subset-swag"]


def behaviour(*numbers):
    COVERED.update(numbers)
    return lambda test: test


@pytest.fixture(autouse=True)
def double_precision():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(240)
    yield
    torch.set_default_dtype(before)


def network(outputs=2):
    """Two linear layers: with Gaussian noise, KFAC's block of each parameter is exact."""
    return nn.Sequential(nn.Linear(3, 5), nn.Linear(5, outputs))


def values(n=10, outputs=2):
    return torch.randn(n, 3), torch.randn(n, outputs)


def labels(n=10):
    return torch.randn(n, 3), torch.randint(2, (n,))


def loader(x, y):
    return DataLoader(TensorDataset(x, y), batch_size=3)


def jacobian(model, x):
    """The dense Jacobian (n, C, p)."""
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    held = dict(model.named_parameters())

    def outputs(*parameters):
        return functional_call(model, dict(zip(names, parameters, strict=True)), (x,))

    parts = jacrev(outputs, argnums=tuple(range(len(names))))(*(held[name].detach() for name in names))
    return torch.cat([part.flatten(2) for part in parts], dim=2)


def curvature(model, x, noise=None):
    """The GGN (p, p), of Gaussian noise or, without it, of classes."""
    J = jacobian(model, x)
    if noise is not None:
        return torch.einsum("ncp,ncq->pq", J, J) / noise**2
    probabilities = model(x).detach().softmax(1)
    H = probabilities.diag_embed() - probabilities[:, :, None] * probabilities[:, None, :]
    return torch.einsum("ncp,ncd,ndq->pq", J, H, J)


def blocks(model):
    """1 where two parameters belong to one tensor (p, p)."""
    owners = torch.cat([torch.full((p.numel(),), k) for k, p in enumerate(model.parameters())])
    return (owners[:, None] == owners).double()


def dense_precision(flavour, model, x, prior, noise=None):
    """The posterior precision; the last layer's among the other parameters without any variance."""
    ggn = curvature(model, x, noise)
    if flavour == "kron":
        ggn = ggn * blocks(model)
    elif flavour == "diag":
        ggn = ggn.diag().diag()
    return ggn + prior * torch.eye(len(ggn))


def last_of(model):
    return sum(p.numel() for p in model[1].parameters())


def regression(flavour="full", prior=0.7, noise=0.3):
    model, (x, y) = network(), values()
    return model, x, y, SubspaceLaplace(model, Gaussian(noise), prior_precision=prior, **FLAVOURS[flavour])


def fitted(flavour="full", prior=0.7, noise=0.3):
    model, x, y, la = regression(flavour, prior, noise)
    return model, x, y, la.fit(loader(x, y))


def classifier(flavour="full", prior=0.7, **options):
    model, (x, y) = network(), labels()
    la = SubspaceLaplace(model, "classification", prior_precision=prior, **FLAVOURS[flavour], **options)
    return model, x, y, la.fit(loader(x, y))


each_flavour = pytest.mark.parametrize("flavour", FLAVOURS)

# Construction ---------------------------------------------------------------------------------------------------------


@behaviour(1, 3, 4)
@each_flavour
def test_every_flavour_is_constructed_and_fitted(flavour):
    model, _, _, la = fitted(flavour)
    assert la.num_parameters == sum(p.numel() for p in model.parameters())
    assert la.dim == (last_of(model) if flavour == "last layer" else 0 if la.projector is None else la.num_parameters)


@behaviour(2)
def test_low_rank_is_a_subspace():
    model, (x, y) = network(), values()
    la = SubspaceLaplace(model, Gaussian(0.3), 4, complement=None, prior_precision=0.7).fit(loader(x, y))
    P, J = la.projection_matrix(), jacobian(model, x)
    inside = torch.linalg.inv(P.T @ curvature(model, x, 0.3) @ P + 0.7 * torch.eye(4))
    expected = torch.einsum("ncp,pq,nqd->ncd", J, P @ inside @ P.T, J.mT)
    torch.testing.assert_close(la.functional_covariance(x), expected)


@behaviour(5, 52, 53, 64, 65)
@pytest.mark.parametrize("flavour", ["full", "kron", "diag"])
def test_parameters_are_chosen_by_requires_grad(flavour):
    model, (x, y) = network(), values()
    for p in model.parameters():
        p.requires_grad_(False)
    model[0].weight.requires_grad_(True)
    la = SubspaceLaplace(model, Gaussian(0.3), prior_precision=0.7, **FLAVOURS[flavour]).fit(loader(x, y))
    assert la.num_parameters == model[0].weight.numel() == la.sample(2).shape[1]
    ggn, J = curvature(model, x, 0.3), jacobian(model, x)
    ggn = ggn.diag().diag() if flavour == "diag" else ggn
    covariance = torch.linalg.inv(ggn + 0.7 * torch.eye(len(ggn)))
    torch.testing.assert_close(la.functional_covariance(x), J @ covariance @ J.mT)


@behaviour(54)
def test_frozen_parameters_do_not_hinder_predictions_and_tuning():
    model, (x, y) = network(), labels(30)
    model[1].requires_grad_(False)
    la = SubspaceLaplace(model, "classification", projector="full", prior_precision=1.0).fit(loader(x, y))
    assert torch.allclose(la.network_samples(x, 3).softmax(-1).sum(-1), torch.ones(3, 30))
    assert la.tuned("evidence").prior_precision != 1.0
    assert la.tuned(loader(*labels())).prior_precision > 0


@behaviour(6, 8)
def test_unknown_likelihoods_and_noise_of_classes_are_refused():
    with pytest.raises(ValueError, match="Unknown likelihood 'otherlh'"):
        SubspaceLaplace(network(), "otherlh")
    with pytest.raises(TypeError, match="noise"):
        SubspaceLaplace(network(), "classification", noise_std=1.2)


@behaviour(7, 9)
def test_noise_is_a_positive_number():
    for noise in (1.2, torch.tensor(1.2), torch.tensor([1.2])):
        la = SubspaceLaplace(network(), Gaussian(noise), prior_precision=1.0).fit(loader(*values()))
        assert la.noise_std in (1.2, (1.2,))
    for noise in ("1.2", torch.tensor([[1.2]]), -1.0):
        with pytest.raises(ValueError, match="noise_std"):
            Gaussian(noise)
    with pytest.raises(ValueError, match="holds 17 numbers"):
        SubspaceLaplace(network(), Gaussian(torch.ones(17))).fit(loader(*values()))


@behaviour(10, 13)
def test_the_prior_precision_is_a_positive_number():
    for prior in (10.6, torch.tensor(10.6), torch.tensor([10.6])):
        assert SubspaceLaplace(network(), "regression", prior_precision=prior).prior_precision == pytest.approx(10.6)
    for prior in (torch.ones(17), "1.5", -1.0):
        with pytest.raises((ValueError, TypeError), match="prior_precision"):
            SubspaceLaplace(network(), "regression", prior_precision=prior)


@behaviour(11)
def test_every_layer_can_have_its_own_prior_precision():
    model, (x, y) = network(), values()
    priors = {name: 0.5 + k for k, (name, _) in enumerate(model.named_parameters())}
    la = SubspaceLaplace(model, Gaussian(0.3), projector="full", prior_precision=priors).fit(loader(x, y))
    J = jacobian(model, x)
    diagonal = torch.cat([torch.full((p.numel(),), priors[name]) for name, p in model.named_parameters()])
    covariance = torch.linalg.inv(curvature(model, x, 0.3) + diagonal.diag())
    torch.testing.assert_close(la.functional_covariance(x), J @ covariance @ J.mT)


@behaviour(16)
def test_a_curvature_that_does_not_fit_is_refused_before_the_work(monkeypatch):
    monkeypatch.setattr("sublaplace.runtime.memory.available_bytes", lambda device: 4000)
    with pytest.raises(MemoryError, match="lowrank-kfac"):
        fitted("full")


# Fit ------------------------------------------------------------------------------------------------------------------


@behaviour(17)
@each_flavour
def test_the_numbers_of_data_and_outputs_are_known(flavour):
    _, _, _, la = fitted(flavour)
    assert la.num_outputs == 2 and "N=10" in repr(la)


@behaviour(18)
def test_the_log_likelihood_of_the_training_data():
    model, x, y, la = fitted()
    expected = Normal(model(x), 0.3).log_prob(y).sum().item()
    assert -10 * la.evaluate(loader(x, y)).plain.scores["nll"] == pytest.approx(expected)
    model, x, y, la = classifier()
    expected = -nn.functional.cross_entropy(model(x), y, reduction="sum").item()
    assert -10 * la.evaluate(loader(x, y)).plain.scores["nll"] == pytest.approx(expected)


def evidence(flavour, model, x, y, prior, noise):
    precision = dense_precision(flavour, model, x, prior, noise)
    theta = torch.cat([p.detach().flatten() for p in model.parameters()])
    if flavour == "last layer":
        precision, theta = precision[-last_of(model) :, -last_of(model) :], theta[-last_of(model) :]
    fit = Normal(model(x), noise).log_prob(y).sum()
    return fit - prior * theta @ theta / 2 + (len(theta) * torch.tensor(prior).log() - precision.logdet()) / 2


@behaviour(19, 20)
@pytest.mark.parametrize("flavour", ["full", "kron", "diag"])
def test_the_evidence_is_its_formula(flavour):
    model, x, y, la = fitted(flavour)
    torch.testing.assert_close(la.log_marginal_likelihood(), evidence(flavour, model, x, y, 0.7, 0.3).detach())
    other = evidence(flavour, model, x, y, 2.0, 0.72).detach()
    torch.testing.assert_close(la.log_marginal_likelihood(2.0, 0.72), other)
    assert (la.prior_precision, la.noise_std) == (0.7, 0.3)


@behaviour(22)
@each_flavour
def test_samples_have_the_mean_and_covariance_of_the_posterior(flavour):
    model, x, _, la = fitted(flavour)
    drawn = la.sample(20_000, torch.Generator().manual_seed(61))
    theta = torch.cat([p.detach().flatten() for p in model.parameters()])
    assert drawn.shape == (20_000, len(theta))
    torch.testing.assert_close(drawn.mean(0), theta, rtol=0, atol=0.05)
    precision = dense_precision(flavour, model, x, 0.7, 0.3)
    if flavour == "last layer":
        drawn, precision = drawn[:, -last_of(model) :], precision[-last_of(model) :, -last_of(model) :]
    torch.testing.assert_close(drawn.T.cov(), torch.linalg.inv(precision), rtol=0, atol=0.06)


@behaviour(23, 45)
@each_flavour
def test_functional_variances_are_those_of_the_dense_posterior(flavour):
    model, x, _, la = fitted(flavour)
    J, precision = jacobian(model, x), dense_precision(flavour, model, x, 0.7, 0.3)
    if flavour == "last layer":
        count = last_of(model)
        J, precision = J[:, :, -count:], precision[-count:, -count:]
    expected = J @ torch.linalg.inv(precision) @ J.mT
    torch.testing.assert_close(la.functional_covariance(x), expected)
    torch.testing.assert_close(la.functional_variance(x), expected.diagonal(dim1=1, dim2=2))


@behaviour(24)
@each_flavour
def test_a_second_fit_replaces_the_first(flavour):
    _, x, y, la = fitted(flavour)
    before = la.log_marginal_likelihood(), la.functional_covariance(x)
    la.fit(loader(x, y))
    assert torch.equal(la.log_marginal_likelihood(), before[0])
    assert torch.equal(la.functional_covariance(x), before[1])
    assert "N=10" in repr(la)


@behaviour(25)
@pytest.mark.parametrize("flavour", ["kron", "diag"])
def test_more_data_add_their_curvature(flavour):
    model, x, y, la = fitted(flavour)
    thrice = la.updated(loader(x, y)).updated(loader(x, y))
    assert "N=30" in repr(thrice)
    J = jacobian(model, x)
    ggn = dense_precision(flavour, model, x, 0.0, 0.3)
    covariance = torch.linalg.inv(3 * ggn + 0.7 * torch.eye(len(ggn)))
    torch.testing.assert_close(thrice.functional_covariance(x), J @ covariance @ J.mT)


@behaviour(27)
@each_flavour
def test_flat_targets_of_one_output_are_refused(flavour):
    model, (x, y) = network(1), values(outputs=1)
    SubspaceLaplace(model, Gaussian(0.3), prior_precision=1.0, **FLAVOURS[flavour]).fit(loader(x, y))
    with pytest.raises(ValueError, match=r"\(n, 1\)"):
        SubspaceLaplace(model, Gaussian(0.3), prior_precision=1.0, **FLAVOURS[flavour]).fit(loader(x, y.flatten()))


@behaviour(28)
@each_flavour
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_results_have_the_dtype_of_the_model(flavour, dtype):
    model, (x, y) = network().to(dtype), values()
    la = SubspaceLaplace(model, Gaussian(0.3), prior_precision=0.7, **FLAVOURS[flavour])
    la.fit(loader(x.to(dtype), y.to(dtype)))
    mean, covariance = la(x.to(dtype))
    assert mean.dtype == covariance.dtype == la.network_samples(x.to(dtype), 2).dtype == dtype


@behaviour(29)
def test_half_precision_is_computed_in_single_precision():
    model, (x, y) = network().half(), values()
    la = SubspaceLaplace(model, Gaussian(0.3), projector="full", prior_precision=0.7)
    with pytest.warns(UserWarning, match="float32 copy"):
        la.fit(loader(x.half(), y.half()))
    mean, _ = la(x.half())
    assert mean.dtype == torch.float32 and model[0].weight.dtype == torch.float16


# Predictions ----------------------------------------------------------------------------------------------------------


@behaviour(30)
def test_unknown_kinds_of_predictions_are_refused():
    _, x, _, la = classifier()
    with pytest.raises(ValueError, match="Unknown link 'linear'"):
        la(x, link="linear")


@behaviour(31, 32, 33)
@each_flavour
def test_regression_predicts_mean_variances_and_joint_covariance(flavour):
    model, x, _, la = fitted(flavour)
    mean, covariance = la(x)
    torch.testing.assert_close(mean, model(x).detach())
    assert covariance.shape == (10, 2, 2)
    assert la.functional_variance(x).shape == (10, 2)
    joint = la.functional_covariance(x, joint=True)
    assert joint.shape == (20, 20)
    torch.testing.assert_close(torch.einsum("bkbl->bkl", joint.view(10, 2, 10, 2)), covariance)


@behaviour(34)
def test_networks_drawn_from_the_posterior_for_regression():
    model, x, _, la = fitted(prior=1e3)  # where the network is nearly linear in its parameters
    drawn = la.network_samples(x, 4000, torch.Generator().manual_seed(0))
    assert drawn.shape == (4000, 10, 2)
    torch.testing.assert_close(drawn.mean(0), model(x).detach(), rtol=0, atol=0.02)
    torch.testing.assert_close(drawn.var(0), la.functional_variance(x), rtol=0.2, atol=1e-4)


@behaviour(35, 39)
def test_probabilities_of_drawn_networks_and_functions():
    _, x, _, la = classifier()
    for drawn in (la.network_samples(x, 100), la.functional_samples(x, 100)):
        probabilities = drawn.softmax(-1)
        assert probabilities.shape == (100, 10, 2)
        torch.testing.assert_close(probabilities.sum(-1), torch.ones(100, 10))


@behaviour(36)
@each_flavour
@pytest.mark.parametrize("link", ["mc", "probit", "bridge"])
def test_probabilities_of_every_link_sum_to_one(flavour, link):
    _, x, _, la = classifier(flavour)
    torch.testing.assert_close(la(x, link=link).sum(1), torch.ones(10))


@behaviour(38, 40)
def test_functional_samples_repeat_with_a_generator_and_are_outputs():
    model, x, _, la = fitted()
    drawn = [la.functional_samples(x, 3000, torch.Generator().manual_seed(123)) for _ in range(2)]
    assert drawn[0].shape == (3000, 10, 2) and torch.equal(*drawn)
    centred = (drawn[0] - model(x).detach()).flatten(1)
    torch.testing.assert_close(centred.T.cov(), la.functional_covariance(x, joint=True), rtol=0, atol=0.02)


def gradient_by_differences(function, x, step=1e-6):
    result = torch.zeros_like(x)
    for place in range(x.numel()):
        shift = torch.zeros(x.numel())
        shift[place] = step
        shift = shift.view_as(x)
        result.view(-1)[place] = (function(x + shift) - function(x - shift)) / (2 * step)
    return result


@behaviour(41, 42, 43, 44)
@pytest.mark.parametrize("what", ["mean", "variance", "joint", "mc", "networks"])
def test_predictions_are_differentiable_in_the_inputs(what):
    if what == "mc":
        _, x, _, la = classifier()
    else:
        _, x, _, la = fitted()
    x = x[:3]
    functions = {
        "mean": lambda x: la(x)[0].sum(),
        "variance": lambda x: la.functional_variance(x).sum(),
        "joint": lambda x: la.functional_covariance(x, joint=True).sum(),
        "mc": lambda x: la(x, link="mc")[:, 0].sum(),
        "networks": lambda x: la.network_samples(x, 10).square().sum(),
    }
    given = x.clone().requires_grad_()
    found = torch.autograd.grad(functions[what](given), given)[0]
    expected = gradient_by_differences(lambda x: functions[what](x).detach(), x)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


# Tuning ---------------------------------------------------------------------------------------------------------------


@behaviour(47)
@pytest.mark.parametrize("flavour", ["full", "kron", "diag"])
def test_the_evidence_is_maximised_over_the_prior(flavour):
    _, _, _, la = fitted(flavour)
    la.optimize_prior_precision(method="marglik")
    best = la.log_marginal_likelihood()
    assert all(la.log_marginal_likelihood(la.prior_precision * factor) < best for factor in (0.9, 1.1))


@behaviour(48)
@each_flavour
def test_validation_data_choose_the_prior(flavour):
    _, _, _, la = classifier(flavour)
    before = la.prior_precision
    la.optimize_prior_precision(method="gridsearch", val_loader=loader(*labels(30)))
    assert la.prior_precision > 0 and la.prior_precision != before


@behaviour(49)
def test_validation_data_keep_the_ratios_of_several_priors():
    model, (x, y) = network(), labels(40)
    priors = {name: 0.5 + k for k, (name, _) in enumerate(model.named_parameters())}
    la = SubspaceLaplace(model, "classification", projector="full", prior_precision=priors).fit(loader(x, y))
    found = la.tuned(loader(*labels(30))).prior_precisions
    factors = [found[name] / priors[name] for name in priors]
    assert factors == pytest.approx([factors[0]] * 4) and factors[0] != 1


# Subsets of single parameters -----------------------------------------------------------------------------------------


def chosen(indices):
    return lambda context: Subset(context.linearization.layout, indices, context.linearization.dtype)


def of_subset(indices, model, x, y):
    return SubspaceLaplace(model, Gaussian(0.3), projector=chosen(indices), complement=None, prior_precision=0.7).fit(
        loader(x, y)
    )


def dense_of_subset(indices, model, x):
    J = jacobian(model, x)[:, :, indices]
    precision = curvature(model, x, 0.3)[indices][:, indices] + 0.7 * torch.eye(len(indices))
    return J @ torch.linalg.inv(precision) @ J.mT


@behaviour(56, 59)
@pytest.mark.parametrize("indices", [torch.tensor([0, 5, 11, 22]), torch.randperm(32)[:10]], ids=["own", "random"])
def test_single_parameters_can_be_chosen(indices):
    model, (x, y) = network(), values()
    la = of_subset(indices, model, x, y)
    assert la.dim == len(indices)
    torch.testing.assert_close(la.functional_covariance(x), dense_of_subset(indices, model, x))


@behaviour(57)
@pytest.mark.parametrize(
    "indices",
    [
        None,
        [0, 5, 11],
        torch.tensor([], dtype=torch.long),
        torch.tensor(3),
        torch.tensor([[0, 5], [11, 2]]),
        torch.tensor([0.0, 5.0]),
        torch.tensor([0, 5], dtype=torch.int32),
        torch.tensor([True, False]),
        torch.tensor([0, -1]),
        torch.tensor([33]),
        torch.tensor([0, 0, 5]),
    ],
    ids=str,
)
def test_impossible_choices_of_parameters_are_refused(indices):
    with pytest.raises(ValueError, match="indices of a Subset"):
        of_subset(indices, network(), *values())


@behaviour(58)
def test_a_subset_is_exact_inside_and_may_have_kfac_outside():
    model, (x, y) = network(), values()
    options = {"dim": 6, "projector": "subset-magnitude", "prior_precision": 0.7}
    alone = SubspaceLaplace(model, Gaussian(0.3), complement=None, **options).fit(loader(x, y))
    both = SubspaceLaplace(model, Gaussian(0.3), complement=Complement("kfac", 1.0), **options).fit(loader(x, y))
    assert (both.functional_variance(x) > alone.functional_variance(x)).all()


@behaviour(60, 61, 62, 68, 69)
@pytest.mark.parametrize("projector", SUBSETS)
def test_subsets_by_a_score(projector):
    model, (x, y) = network(), values()
    theta = torch.cat([p.detach().flatten().clone() for p in model.parameters()])
    la = SubspaceLaplace(model, Gaussian(0.3), 8, projector=projector, prior_precision=0.7).fit(loader(x, y))
    indices = la.projection_matrix().argmax(0)
    assert la.dim == 8 == len(indices.unique())
    if projector == "subset-magnitude":
        assert set(indices.tolist()) == set(theta.abs().topk(8).indices.tolist())
    elif projector == "subset-diagonal":
        assert set(indices.tolist()) == set((-curvature(model, x, 0.3).diag()).topk(8).indices.tolist())
    torch.testing.assert_close(la.functional_covariance(x), dense_of_subset(indices, model, x))
    assert torch.equal(theta, torch.cat([p.detach().flatten() for p in model.parameters()]))
    classes = SubspaceLaplace(model, "classification", 8, projector=projector, prior_precision=0.7)
    classes.fit(loader(*labels()))
    for link in ("mc", "probit", "bridge"):
        torch.testing.assert_close(classes(x, link=link).sum(1), torch.ones(10))


@behaviour(63)
def test_a_subset_is_never_larger_than_the_network():
    la = SubspaceLaplace(network(), Gaussian(0.3), 99_999, projector="subset-magnitude", prior_precision=0.7)
    assert la.fit(loader(*values())).dim == la.num_parameters


@behaviour(66, 67)
@pytest.mark.parametrize("flavour", ["last layer", "full"])
def test_a_layer_or_all_parameters_as_a_subset(flavour):
    model, x, y, la = fitted(flavour)
    indices = torch.arange(la.num_parameters)
    indices = indices[-last_of(model) :] if flavour == "last layer" else indices
    subset = of_subset(indices, model, x, y)
    torch.testing.assert_close(subset.functional_covariance(x), la.functional_covariance(x))


# Batches that are mappings --------------------------------------------------------------------------------------------


class OfMapping(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 2))

    def forward(self, batch):
        return self.net(batch["x"])


def mappings(of_classes):
    return [
        {"x": torch.randn(3, 5), "answer": torch.randint(2, (3,)) if of_classes else torch.randn(3, 2)}
        for _ in range(4)
    ]


@behaviour(71, 72, 74)
@pytest.mark.parametrize("flavour", ["kron", "diag"])
@pytest.mark.parametrize("of_classes", [True, False])
def test_batches_that_are_mappings(flavour, of_classes):
    model, batches = OfMapping(), mappings(of_classes)
    likelihood = Categorical() if of_classes else Gaussian(0.3)
    options = {"labels_key": "answer", "forward": lambda model, batch: model(batch), **FLAVOURS[flavour]}
    la = SubspaceLaplace(model, likelihood, prior_precision=1.0, **options).fit(batches)
    outputs = model(batches[0]).detach()
    if of_classes:
        torch.testing.assert_close(la(batches[0]).sum(1), torch.ones(3))
        assert torch.equal(la(batches[0]), la({"x": batches[0]["x"]}))
    else:
        mean, covariance = la(batches[0])
        torch.testing.assert_close(mean, outputs)
        assert covariance.shape == (3, 2, 2)
    assert la.network_samples(batches[0], 4).shape == (4, 3, 2)


@behaviour(73)
def test_a_missing_key_is_named():
    with pytest.raises(ValueError, match="labels_key"):
        SubspaceLaplace(OfMapping(), "classification", forward=lambda model, batch: model(batch)).fit(mappings(True))


# The table ------------------------------------------------------------------------------------------------------------


def rows():
    found = re.findall(r"^\| (\d+) \| .* \| (have|differs|have not) \|", TABLE.read_text(), flags=re.MULTILINE)
    return {int(number): verdict for number, verdict in found}


def test_the_table_says_what_is_tested():
    table = rows()
    assert list(table) == list(range(1, len(table) + 1))
    assert {number for number, verdict in table.items() if verdict != "have not"} == COVERED


def test_the_table_is_counted_rightly():
    verdicts = list(rows().values())
    said = re.search(r"Of (\d+) behaviours, we have (\d+), (\d+) in another form, and (\d+) not", TABLE.read_text())
    counts = [len(verdicts), *(verdicts.count(verdict) for verdict in ("have", "differs", "have not"))]
    assert [int(number) for number in said.groups()] == counts


def test_the_reference_of_kfac_is_not_the_full_posterior():
    """The brute-force posteriors that the flavours are compared with differ from each other."""
    model, (x, _) = network(), values()
    found = [
        MultivariateNormal(torch.zeros(32), precision_matrix=dense_precision(f, model, x, 0.7, 0.3))
        for f in ("full", "kron", "diag")
    ]
    entropies = [float(one.entropy()) for one in found]
    assert len({round(entropy, 3) for entropy in entropies}) == 3
