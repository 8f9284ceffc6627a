"""Outputs with positions, (n, T, C) of sequences and (n, C, H, W) of segmentations, against brute force."""

import copy
import pickle
from itertools import product
from math import log, pi

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from sublaplace import (
    Bernoulli,
    Captured,
    Categorical,
    Complement,
    CurvatureStream,
    Gaussian,
    Linearization,
    Resources,
    SubspaceLaplace,
    metrics,
    ood,
)
from sublaplace.curvature import kfac as kfac_module
from sublaplace.curvature.diagonal import diagonal_ggn
from sublaplace.curvature.directions import Roots, SampledRoots
from sublaplace.curvature.kfac import kronecker_ggn
from sublaplace.fitting.validation import NOISE_PULL, pooled_validation
from sublaplace.jacobians.forward import ChosenOutputs
from sublaplace.model.calling import call_model
from sublaplace.model.likelihoods.at_positions import AtPositions, at_positions, restored_likelihood
from sublaplace.model.likelihoods.links import mean_softmax
from sublaplace.model.output_layout import FlatOutputs, OutputLayout
from sublaplace.runtime.stopwatch import Stopwatch
from tests.dense_reference import pairwise_probabilities

C, N, PRIOR = 3, 7, 0.7
IGNORED = -100


class Sequence(nn.Module):
    """Every position sees those before it: (n, T, 2) to (n, T, C)."""

    def __init__(self, classes=C):
        super().__init__()
        self.first, self.mixed, self.last = nn.Linear(2, 3), nn.Linear(3, 3, bias=False), nn.Linear(3, classes)

    def forward(self, x):
        hidden = torch.tanh(self.first(x))
        before = hidden.cumsum(1) / torch.arange(1, x.shape[1] + 1, dtype=x.dtype)[:, None]
        return self.last(torch.tanh(hidden + self.mixed(before)))


class Segmentation(nn.Module):
    """(n, 1, H, W) to (n, C, H, W)."""

    def __init__(self, classes=C):
        super().__init__()
        self.first, self.last = nn.Conv2d(1, 3, 3, padding=1), nn.Conv2d(3, classes, 1)

    def forward(self, x):
        return self.last(torch.tanh(self.first(x)))


class One(nn.Module):
    """The outputs of a network at one position."""

    def __init__(self, model, pick):
        super().__init__()
        self.model, self.pick = model, pick

    def forward(self, x):
        return self.pick(self.model(x))


def drawn(*shape, seed=1):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


SHAPES = {"sequence": (4, 2), "segmentation": (1, 2, 3)}
CLASS_DIMS = {"sequence": -1, "segmentation": 1}


def network(kind, seed=0):
    torch.manual_seed(seed)
    return (Sequence() if kind == "sequence" else Segmentation()).double()


def inputs_of(kind, n=N, seed=1):
    return drawn(n, *SHAPES[kind], seed=seed)


def labels_of(kind, n=N, seed=2, ignored=True):
    shape = (n, 4) if kind == "sequence" else (n, 2, 3)
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, C, shape, generator=generator)
    return labels.masked_fill(torch.rand(shape, generator=generator) < 0.3, IGNORED) if ignored else labels


def plausible_labels(kind, x, seed=2):
    """Labels as the network predicts them, but more surely, and some of them ignored."""
    logits = 3 * network(kind)(x).detach().movedim(CLASS_DIMS[kind], -1)
    generator = torch.Generator().manual_seed(seed)
    labels = torch.multinomial(logits.softmax(-1).flatten(0, -2), 1, generator=generator).view(logits.shape[:-1])
    return labels.masked_fill(torch.rand(labels.shape, generator=generator) < 0.3, IGNORED)


def likelihood_of(kind, **options):
    return Categorical(ignore_index=IGNORED, class_dim=CLASS_DIMS[kind], **options)


def dense_jacobian(model, inputs):
    """J of every output in the network's own order, (n, *S, p), one output after the other."""
    rows = []
    for i in range(len(inputs)):
        outputs = model(inputs[i : i + 1])[0]
        rows.append(
            torch.stack(
                [
                    torch.cat(
                        [g.flatten() for g in torch.autograd.grad(f, list(model.parameters()), retain_graph=True)]
                    )
                    for f in outputs.flatten()
                ]
            ).view(*outputs.shape, -1)
        )
    return torch.stack(rows)


def positions_of(kind, outputs):
    """The index, behind the input, of the classes at every position."""
    if kind == "sequence":
        return [(t, slice(None)) for t in range(outputs.shape[1])]
    return [(slice(None), h, w) for h, w in product(range(outputs.shape[2]), range(outputs.shape[3]))]


def softmax_hessian(f):
    p = f.softmax(0)
    return p.diag() - torch.outer(p, p)


def dense_ggn(kind, model, inputs, weights):
    """Σ w JᵀHJ over all inputs and positions; weights (n, …positions)."""
    J, outputs = dense_jacobian(model, inputs), model(inputs).detach()
    total = 0
    for i in range(len(inputs)):
        for place, weight in zip(positions_of(kind, outputs), weights[i].flatten(), strict=True):
            rows = J[i][place]
            total = total + weight * rows.T @ softmax_hessian(outputs[i][place]) @ rows
    return total


def flattened(J):
    return J.flatten(0, -2)


def covariance(J, precision):
    """J Λ⁻¹ Jᵀ of every input, with the shape of the outputs on both sides."""
    shape = J.shape[1:-1]
    flat = J.flatten(1, -2)
    return (flat @ torch.linalg.solve(precision, flat.mT)).view(len(J), *shape, *shape)


def variance(J, precision):
    return (J * torch.linalg.solve(precision, flattened(J).T).T.view(J.shape)).sum(-1)


def counted(labels):
    return (labels != IGNORED).double()


BOTH = pytest.mark.parametrize("kind", ["sequence", "segmentation"])


# The posterior --------------------------------------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize("masked", [False, True], ids=["ignored labels", "mask"])
def test_the_full_posterior_is_that_of_brute_force(kind, masked):
    model, x, y = network(kind), inputs_of(kind), labels_of(kind)
    batch = (x, y)
    if masked:
        batch = (x, y.clamp_min(0), y != IGNORED)
    data = [tuple(part[:3] for part in batch), tuple(part[3:] for part in batch)]
    la = SubspaceLaplace(model, likelihood_of(kind), projector="full", prior_precision=PRIOR).fit(data)
    precision = dense_ggn(kind, model, x, counted(y)) + PRIOR * torch.eye(la.num_parameters, dtype=torch.float64)
    new = inputs_of(kind, 3, seed=5)
    J = dense_jacobian(model, new)
    expected = covariance(J, precision)
    assert torch.allclose(la.functional_covariance(new), expected, rtol=1e-8)
    assert torch.allclose(la.functional_variance(new), variance(J, precision), rtol=1e-8)
    joint = flattened(J) @ torch.linalg.solve(precision, flattened(J).T)
    assert torch.allclose(la.functional_covariance(new, joint=True), joint, rtol=1e-8)
    assert torch.allclose(la.full_covariance(new).covariance, expected, rtol=1e-6)
    assert la.full_covariance(new, joint=True).covariance.shape == joint.shape
    log_likelihood = sum(
        float(F.log_softmax(model(x)[i][place].detach(), 0)[int(label)])
        for i in range(N)
        for place, label in zip(positions_of(kind, model(x)), y[i].flatten(), strict=True)
        if label != IGNORED
    )
    assert la._state.survey.fixed_log_likelihood == pytest.approx(log_likelihood, rel=1e-10)
    assert la._state.survey.num_data == N


@BOTH
@pytest.mark.parametrize("samples", [None, 4], ids=["all directions", "sampled directions"])
def test_the_posterior_in_a_subspace_is_that_of_brute_force(kind, samples):
    model, x, y = network(kind), inputs_of(kind), labels_of(kind)
    resources = Resources(curvature_samples="all" if samples is None else samples)
    la = SubspaceLaplace.paper(model, likelihood_of(kind), 6, PRIOR, resources=resources).fit([(x, y)])
    P = la.projection_matrix()
    reduced = P.T @ dense_ggn(kind, model, x, counted(y)) @ P + PRIOR * P.T @ P
    new = inputs_of(kind, 3, seed=5)
    J = dense_jacobian(model, new)
    prediction = la.predict(new)
    assert la.dim == 6
    assert torch.allclose(prediction.mean, model(new).detach())
    assert torch.allclose(prediction.variance, variance(J @ P, reduced), rtol=1e-7, atol=1e-12)
    assert torch.allclose(la.functional_covariance(new), covariance(J @ P, reduced), rtol=1e-7, atol=1e-12)
    drawn_functions = la.functional_samples(new, 4000)
    assert drawn_functions.shape == (4000, *prediction.mean.shape)
    assert torch.allclose(drawn_functions.var(0), prediction.variance, rtol=0.15, atol=1e-9)
    assert la.leading_traces(new)[-1] == pytest.approx(float(prediction.variance.sum()), rel=1e-8)


def stream_of(kind, x, y, samples=None, weights=None, seed=0):
    linearization = Linearization(network(kind), FlatOutputs(call_model, CLASS_DIMS[kind]))
    batch = (x, y) if weights is None else (x, y, weights)
    likelihood = AtPositions(likelihood_of(kind), C)
    return CurvatureStream(linearization, [batch], likelihood, 0.0, samples=samples, seed=seed)


@BOTH
def test_the_diagonal_is_that_of_brute_force(kind):
    x, y = inputs_of(kind), labels_of(kind)
    weights = torch.rand(y.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    found = diagonal_ggn(stream_of(kind, x, y, weights=weights), PRIOR)
    expected = dense_ggn(kind, network(kind), x, counted(y) * weights).diagonal()
    assert torch.allclose(torch.cat([part.diagonal for part in found.parts.values()]), expected, rtol=1e-9)


@BOTH
def test_kfac_is_that_of_its_definition(kind):
    """G = Σ g gᵀ over inputs, positions and directions, A = the mean of a aᵀ over inputs and positions."""
    model, x, y = network(kind), inputs_of(kind), labels_of(kind)
    seen = {}
    for name in ("first", "last"):
        layer = getattr(model, name)
        layer.register_forward_hook(lambda _, given, made, name=name: seen.update({name: (given[0], made)}))
    outputs = model(x)
    A, G = {}, dict.fromkeys(seen, 0.0)
    counts = counted(y).flatten(1).any(1)  # of a sequence, one input is ignored altogether
    assert bool(counts.all()) == (kind == "segmentation")
    for name, (given, _) in seen.items():
        layer = getattr(model, name)
        if kind == "segmentation":
            given = F.unfold(given, layer.kernel_size, padding=layer.padding).mT
        flat = given[counts].flatten(0, 1)
        A[name] = flat.T @ flat / len(flat)
    for i in range(N):
        for place, label in zip(positions_of(kind, outputs), y[i].flatten(), strict=True):
            if label == IGNORED:
                continue
            values, vectors = torch.linalg.eigh(softmax_hessian(outputs[i][place].detach()))
            for u in (vectors * values.clamp_min(0).sqrt()).T:
                for name, (_, made) in seen.items():
                    (g,) = torch.autograd.grad(outputs[i][place] @ u, made, retain_graph=True)
                    g = g[i].flatten(1).T if kind == "segmentation" else g[i]
                    G[name] = G[name] + g.T @ g
    found = kronecker_ggn(stream_of(kind, x, y), PRIOR)
    for name in seen:
        v = drawn(1, A[name].shape[0] * G[name].shape[0])
        expected = torch.kron(G[name], A[name]) @ v[0] + PRIOR * v[0]
        assert torch.allclose(found.parts[f"{name}.weight"].matmul(v, PRIOR)[0], expected, rtol=1e-8)


def test_sampled_directions_have_the_block_diagonal_second_moment_of_all_positions():
    likelihood, count = AtPositions(likelihood_of("sequence"), C), 20_000
    outputs, weights = drawn(1, 4 * C), torch.tensor([[1.0, 0.0, 0.5, 2.0]]).double()
    spread = likelihood.spread_weights(weights)
    expected = torch.block_diag(*(w * softmax_hessian(f) for w, f in zip(weights[0], outputs.view(4, C), strict=True)))
    roots = Roots(likelihood, spread)
    rows = roots(outputs)[0]
    assert torch.allclose(rows.T @ rows, expected, atol=1e-12)
    columns = drawn(1, 4 * C, 5)
    assert torch.allclose(roots.times(outputs, columns)[0].T @ roots.times(outputs, columns)[0],
                          columns[0].T @ expected @ columns[0], atol=1e-12)  # fmt: skip
    many = Roots(likelihood, spread.expand(count, -1))
    sampled = SampledRoots(many, 6, torch.arange(count), 3)(outputs.expand(count, -1))
    found = torch.einsum("nka,nkb->ab", sampled, sampled) / count
    assert (found - expected).abs().max() < expected.trace() / count**0.5
    assert not sampled.view(count, 6, 4, C)[:, :, 1].any()  # an ignored position


def test_sampled_curvature_is_right_in_the_mean():
    x, y = inputs_of("sequence"), labels_of("sequence")
    exact = diagonal_ggn(stream_of("sequence", x, y), PRIOR).parts["first.weight"].diagonal
    found = torch.stack(
        [
            diagonal_ggn(stream_of("sequence", x, y, samples=4, seed=seed), PRIOR).parts["first.weight"].diagonal
            for seed in range(60)
        ]
    )
    error = found.std(0) / 60**0.5
    assert ((found.mean(0) - exact).abs() < 5 * error).all()
    assert (found.std(0) > 0).all()


# Equal to other ways --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options", [{"projector": "full"}, {"dim": 5}, {"dim": 5, "complement": Complement("kfac", 1.0)}]
)
def test_one_position_is_the_plain_case(options):
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, C)).double()

    class WithPosition(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = copy.deepcopy(plain)

        def forward(self, x):
            return self.inner(x)[:, None]

    x, y, new = drawn(30, 2), torch.arange(30) % C, drawn(5, 2, seed=9)
    given = {"complement": None, "prior_precision": PRIOR} | options
    given |= {"complement": None} if "projector" in options else {}
    one = SubspaceLaplace(plain, "classification", **given).fit([(x, y)])
    other = SubspaceLaplace(WithPosition(), Categorical(class_dim=-1), **given).fit([(x, y[:, None])])
    assert torch.allclose(other(new)[:, 0], one(new), rtol=1e-8)
    assert torch.allclose(other.functional_variance(new)[:, 0], one.functional_variance(new), rtol=1e-8)
    p, q = one.predict(new), other.predict(new)
    assert torch.allclose(q.covariance[:, 0], p.covariance, rtol=1e-8)
    assert torch.allclose(q.mutual_information[:, 0], p.mutual_information, atol=0.02)
    scores = [la.evaluate([(x, t)]).posterior.scores for la, t in ((one, y), (other, y[:, None]))]
    assert scores[0] == pytest.approx(scores[1], rel=1e-8)
    tuned = [la.tuned([(new.repeat(4, 1), t)]) for la, t in ((one, y[:20]), (other, y[:20, None]))]
    assert tuned[0].prior_precision == pytest.approx(tuned[1].prior_precision, rel=0.03)  # interpolated otherwise


def test_without_validation_data_one_position_has_the_plain_prior():
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, C)).double()
    x = drawn(60, 2)
    y = torch.multinomial((3 * plain(x)).softmax(1), 1, generator=torch.Generator().manual_seed(1))[:, 0]
    model = nn.Sequential(copy.deepcopy(plain), nn.Unflatten(1, (1, C)))
    one = SubspaceLaplace(plain, "classification", 5, complement=None).fit([(x, y)])
    other = SubspaceLaplace(model, Categorical(class_dim=2), 5).fit([(x, y[:, None])])
    assert other.prior_precision == pytest.approx(one.prior_precision, rel=1e-6)
    assert "leave-one-out of the linearised network" in other.summary()
    assert "1 positions of 3 classes" in other.summary()


PICKS = {"sequence": ((2,), lambda f: f[:, 2]), "segmentation": ((1, 0), lambda f: f[:, :, 1, 0])}


@BOTH
@pytest.mark.parametrize("masked", [False, True], ids=["ignored labels", "mask"])
def test_all_positions_but_one_ignored_is_that_position_alone(kind, masked):
    (place, pick), model, x = PICKS[kind], network(kind), inputs_of(kind)
    y = labels_of(kind, ignored=False)
    only = torch.zeros_like(y, dtype=torch.bool)
    only[(slice(None), *place)] = True
    batch = (x, y, only) if masked else (x, y.masked_fill(~only, IGNORED))
    given = {"projector": "full", "prior_precision": PRIOR}
    several = SubspaceLaplace(model, likelihood_of(kind), **given).fit([batch])
    single = SubspaceLaplace(One(model, pick), "classification", **given).fit([(x, y[only])])
    new = inputs_of(kind, 4, seed=8)
    assert torch.allclose(pick(several(new)), single(new), rtol=1e-8)
    assert torch.allclose(pick(several.functional_variance(new)), single.functional_variance(new), rtol=1e-8)
    evidence = [float(la.log_marginal_likelihood()) for la in (several, single)]
    assert evidence[0] == pytest.approx(evidence[1], rel=1e-9)
    found, expected = several.evaluate([batch]), single.evaluate([(x, y[only])])
    assert found.num_inputs == N
    assert found.posterior.scores == pytest.approx(expected.posterior.scores, rel=1e-8)
    assert found.gain == pytest.approx(expected.gain, rel=1e-8)


@BOTH
def test_leave_one_out_with_a_mask_is_that_with_ignored_labels(kind):
    model, x = network(kind), inputs_of(kind, 60)
    y = plausible_labels(kind, x)
    one = SubspaceLaplace(model, likelihood_of(kind), 5).fit([(x, y)])
    other = SubspaceLaplace(model, likelihood_of(kind), 5).fit([(x, y.clamp_min(0), y != IGNORED)])
    assert one.prior_precision == pytest.approx(other.prior_precision, rel=1e-8)
    assert one.complement_weight is None  # nothing outside


def test_the_axis_of_the_classes_does_not_matter():
    model, x, y = network("segmentation"), inputs_of("segmentation"), labels_of("segmentation")
    moved = One(model, lambda f: f.movedim(1, -1))
    given = {"projector": "full", "prior_precision": PRIOR}
    first = SubspaceLaplace(model, likelihood_of("segmentation"), **given).fit([(x, y)])
    last = SubspaceLaplace(moved, Categorical(ignore_index=IGNORED, class_dim=-1), **given).fit([(x, y)])
    assert torch.allclose(first(x), last(x).movedim(-1, 1), rtol=1e-9)
    tops = [la.predict(x).top(2) for la in (first, last)]
    assert torch.equal(tops[0].classes, tops[1].classes.movedim(-1, 1))
    assert torch.allclose(tops[0].variance, tops[1].variance.movedim(-1, 1), rtol=1e-8)


# Regression and yes/no ------------------------------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize("name", ["regression", "yes/no"])
def test_every_entry_of_other_likelihoods_is_an_output(name, kind):
    model, x = network(kind), inputs_of(kind)
    flat = One(copy.deepcopy(model), lambda f: f.flatten(1))
    targets = drawn(*model(x).shape, seed=4)
    likelihood = Gaussian(0.5)
    if name == "yes/no":
        likelihood = Bernoulli(ignore_index=IGNORED)
        targets = (targets > 0).double().masked_fill(targets > 1, IGNORED)
    given = {"projector": "full", "prior_precision": PRIOR}
    several = SubspaceLaplace(model, likelihood, **given).fit([(x, targets)])
    plain = SubspaceLaplace(flat, likelihood, **given).fit([(x, targets.flatten(1))])
    new = inputs_of(kind, 4, seed=8)
    p, q = several.predict(new), plain.predict(new)
    assert torch.allclose(p.mean.flatten(1), q.mean)
    assert torch.allclose(p.variance.flatten(1), q.variance, rtol=1e-9)
    assert p.total.shape == p.aleatoric.shape == p.epistemic.shape == p.covariance.shape == p.mean.shape
    if name == "regression":
        assert torch.allclose(p.total, p.variance + 0.25)
        assert torch.allclose(p.interval().upper.flatten(1), q.interval().upper)
        mean, spread = several(new)
        assert torch.equal(mean, p.mean) and torch.equal(spread, p.variance)
        assert torch.allclose(p.mutual_information, 0.5 * (1 + p.variance / 0.25).log())
    else:
        assert torch.allclose(several(new).flatten(1), plain(new), rtol=1e-9)
        assert torch.allclose(several(new, link="mc").mean(), plain(new, link="mc").mean(), atol=0.02)
        assert (p.total - p.aleatoric - p.epistemic).abs().max() < 1e-9
    scored, expected = several.evaluate([(x, targets)]), plain.evaluate([(x, targets.flatten(1))])
    share = int((targets != IGNORED).sum())
    assert scored.num_inputs == share
    if name == "regression":  # the plain NLL has the covariances of an input's outputs
        assert scored.posterior.scores["crps"] == pytest.approx(expected.posterior.scores["crps"], rel=1e-6)
        variances = several.predict(x).variance + 0.25
        density = -0.5 * ((targets - model(x).detach()).square() / variances + (2 * pi * variances).log())
        assert scored.posterior.scores["nll"] == pytest.approx(-float(density.mean()), rel=1e-8)
    else:
        assert scored.posterior.scores["nll"] * share == pytest.approx(expected.posterior.scores["nll"] * N, rel=1e-8)
        assert scored.posterior.scores["accuracy"] == pytest.approx(expected.posterior.scores["accuracy"])


def test_noise_is_estimated_from_the_positions_that_count():
    model, x = network("sequence"), inputs_of("sequence")
    targets = drawn(N, 4, C, seed=4)
    mask = torch.rand(N, 4, C, generator=torch.Generator().manual_seed(6)) < 0.6
    la = SubspaceLaplace.paper(model, "regression", 4).fit([(x, targets.where(mask, 1e3), mask)])
    residuals = (targets - model(x).detach())[mask]
    assert la.noise_std == pytest.approx(float(residuals.square().mean().sqrt()), rel=1e-9)
    assert la.evaluate([(x, targets.where(mask, 1e3), mask)]).num_inputs == int(mask.sum())


# Predictions ----------------------------------------------------------------------------------------------------------


def by_rows(kind, tensor):
    """Every position as a row: (n·L, C)."""
    return (tensor.movedim(1, -1) if kind == "segmentation" else tensor).reshape(-1, tensor.shape[CLASS_DIMS[kind]])


POSTERIORS = {
    "subspace": {"dim": 4, "complement": None},
    "complement": {"dim": 4, "complement": Complement("kfac", 1.0)},
    "full": {"projector": "full"},
}


@BOTH
@pytest.mark.parametrize("name", POSTERIORS)
def test_probabilities_and_entropies_are_those_of_each_position(name, kind):
    model, x, y = network(kind), inputs_of(kind), labels_of(kind)
    la = SubspaceLaplace(model, likelihood_of(kind), prior_precision=0.1, **POSTERIORS[name]).fit([(x, y)])
    new = inputs_of(kind, 3, seed=5)
    whole, prediction = la.functional_covariance(new), la.predict(new)
    n = len(new)
    blocks = torch.stack(
        [
            whole[i][place + place]
            if kind == "sequence"
            else whole[i][place[0], place[1], place[2], :, place[1], place[2]]
            for i in range(n)
            for place in positions_of(kind, prediction.mean)
        ]
    )
    rows, spreads = by_rows(kind, prediction.mean), blocks.diagonal(dim1=1, dim2=2)
    assert torch.allclose(by_rows(kind, la(new)), pairwise_probabilities(rows, spreads), rtol=1e-7)
    assert torch.allclose(by_rows(kind, la(new, link="bridge")), mean_softmax(rows, blocks, "bridge"), rtol=1e-6)
    sampled = mean_softmax(rows, blocks, "mc", 20_000, torch.Generator().manual_seed(5))
    assert torch.allclose(by_rows(kind, la.predict(new, "mc", samples=20_000).probabilities), sampled, atol=0.02)
    assert torch.allclose(prediction.covariance.flatten(0, -3), blocks, rtol=1e-6, atol=1e-12)
    shape = labels_of(kind, n).shape
    assert prediction.total.shape == prediction.aleatoric.shape == prediction.mutual_information.shape == shape
    factors = torch.linalg.cholesky(blocks + 1e-12 * torch.eye(C))
    normal = torch.randn(2000, len(rows), C, 1, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    probabilities = (rows + (factors @ normal)[..., 0]).softmax(-1)
    entropy = torch.special.entr(probabilities.mean(0)).sum(1)
    assert torch.allclose(prediction.total.flatten(), entropy, atol=0.05)
    expected = torch.special.entr(probabilities).sum(2).mean(0)
    assert torch.allclose(prediction.aleatoric.flatten(), expected, atol=0.05)
    assert torch.allclose(prediction.total, prediction.aleatoric + prediction.epistemic, atol=1e-9)
    assert torch.allclose(ood.epistemic_variance(prediction), prediction.variance.mean(CLASS_DIMS[kind]))
    assert ood.predictive_entropy(prediction).shape == shape
    assert torch.allclose(prediction.plain().probabilities, prediction.mean.softmax(CLASS_DIMS[kind]), rtol=1e-7)
    once = la.predict(iter([new]))
    assert torch.allclose(once.covariance, prediction.covariance, rtol=1e-6, atol=1e-12)
    top, dim = prediction.top(2), CLASS_DIMS[kind]
    assert torch.allclose(top.probabilities, la(new).topk(2, dim).values)
    assert torch.allclose(top.variance, prediction.variance.gather(dim, top.classes))
    assert torch.allclose(la.functional_variance(new, outputs=top.classes), top.variance, rtol=1e-7)
    assert torch.allclose(la.functional_variance([new[:1], new[1:]], outputs=top.classes), top.variance, rtol=1e-7)
    chosen = la.functional_covariance(new, outputs=[2, 0])
    index = torch.tensor([2, 0])
    first, second = (2, 4) if kind == "sequence" else (1, 4)
    assert torch.allclose(chosen, whole.index_select(first, index).index_select(second, index), rtol=1e-6, atol=1e-12)


def test_chosen_entries_are_places_among_all():
    model, x = network("sequence"), inputs_of("sequence")
    la = SubspaceLaplace.paper(model, Gaussian(0.5), 4).fit([(x, drawn(N, 4, C))])
    found = la.functional_variance(x, outputs=[0, 7])
    assert torch.allclose(found, la.functional_variance(x).flatten(1)[:, [0, 7]], rtol=1e-8)


def test_chosen_outputs_are_directions():
    outputs, places = drawn(2, 6), torch.tensor([[4, 1], [0, 0]])
    chosen = ChosenOutputs(places)
    rows, products, weights = chosen(outputs), drawn(2, 6, 3), drawn(2, 5, 2)
    assert torch.equal(rows[0, 0].nonzero().flatten(), torch.tensor([4]))
    assert torch.allclose(chosen.times(outputs, products), rows @ products)
    assert torch.allclose(chosen.combined(outputs, weights), weights @ rows)


def test_sequences_of_other_lengths_are_predicted_alike():
    model, x, y = network("sequence"), inputs_of("sequence"), labels_of("sequence")
    short = [(x[:3, :2], y[:3, :2]), (x[3:], y[3:])]
    la = SubspaceLaplace(model, likelihood_of("sequence"), 5, prior_precision=PRIOR, subspace_inputs=x).fit(short)
    padded = y.clone()
    padded[:3, 2:] = IGNORED  # later positions do not change earlier ones
    other = SubspaceLaplace(model, likelihood_of("sequence"), 5, prior_precision=PRIOR, subspace_inputs=x)
    P = la.projection_matrix()
    reduced = P.T @ dense_ggn("sequence", model, x, counted(padded)) @ P + PRIOR * P.T @ P
    assert torch.allclose(la.functional_variance(x), variance(dense_jacobian(model, x) @ P, reduced), rtol=1e-7)
    assert la(x[:, :3]).shape == (N, 3, C)
    assert torch.allclose(la(x[:, :3]), la(x)[:, :3], rtol=1e-8)
    other.fit([(x, padded)])
    assert other.evaluate(short).num_inputs == la.evaluate(short).num_inputs == int((padded != IGNORED).sum())
    with pytest.raises(ValueError, match=r"from \(n, 2, 3\) to \(n, 4, 3\).*predict for each batch"):
        la.predict([x[:3, :2], x[3:]])
    with pytest.raises(ValueError, match="outputs of different shapes"):
        la.functional_variance([x[:3, :2], x[3:]], outputs=[1])
    with pytest.raises(ValueError, match="outputs of different shapes"):
        la.functional_samples([x[:3, :2], x[3:]], 2)


def test_pictures_that_lie_and_stand_are_not_mixed():
    model, x, y = network("segmentation"), inputs_of("segmentation"), labels_of("segmentation")
    la = SubspaceLaplace(model, likelihood_of("segmentation"), 4, prior_precision=PRIOR).fit([(x, y)])
    assert torch.allclose(la(x.mT), la.predict(x.mT).probabilities) and la(x.mT).shape == (N, C, 3, 2)
    with pytest.raises(ValueError, match=r"from \(n, 3, 2, 3\) to \(n, 3, 3, 2\)"):
        la([x, x.mT])  # as many outputs
    both = la.evaluate([(x, y), (x.mT, y.mT)])
    assert both.num_inputs == 2 * int((y != IGNORED).sum())


# Validation and evaluation --------------------------------------------------------------------------------------------


@BOTH
def test_evaluation_pools_the_positions_that_count(kind):
    model, x, y = network(kind), inputs_of(kind), labels_of(kind)
    la = SubspaceLaplace(model, likelihood_of(kind), 4, prior_precision=PRIOR).fit([(x, y)])
    found = la.evaluate([(x[:4], y[:4]), (x[4:], y[4:])])
    kept = (y != IGNORED).flatten()
    probabilities, labels = by_rows(kind, la(x))[kept], y.flatten()[kept]
    scores = found.posterior.scores
    assert scores["nll"] == pytest.approx(metrics.nll(probabilities, labels), rel=1e-8)
    assert scores["ece"] == pytest.approx(metrics.ece(probabilities, labels), rel=1e-8)
    assert scores["brier"] == pytest.approx(metrics.brier(probabilities, labels), rel=1e-8)
    assert scores["accuracy"] == pytest.approx(metrics.accuracy(probabilities, labels))
    assert f"on {int(kept.sum())} positions" in repr(found)
    # Inputs are independent, the positions of one are not.
    gains = found.posterior.log_densities - found.plain.log_densities
    owner = torch.arange(N).repeat_interleave(y[0].numel())[kept]
    inputs = owner.unique().tolist()
    sums = torch.tensor([float((gains[owner == i] - gains.mean()).sum()) for i in inputs], dtype=torch.float64)
    corrected = len(inputs) / (len(inputs) - 1)
    assert found.gain[0] == pytest.approx(float(gains.mean()))
    assert found.gain[1] == pytest.approx(float((sums.square().sum() * corrected).sqrt() / len(gains)))


@BOTH
@pytest.mark.parametrize("name", ["subspace", "full"])
def test_validation_sees_what_other_priors_predict(name, kind):
    model, x, y = network(kind), inputs_of(kind), labels_of(kind)
    options = POSTERIORS[name]
    la = SubspaceLaplace(model, likelihood_of(kind), prior_precision=PRIOR, **options).fit([(x, y)])
    new, labels = inputs_of(kind, 12, seed=5), labels_of(kind, 12, seed=6)
    data = pooled_validation(la._state, [(new[:5], labels[:5]), (new[5:], labels[5:])], Stopwatch())
    for tau in data.taus[::6].tolist():
        expected = la.with_prior(tau).evaluate([(new, labels)]).posterior.scores["nll"]
        assert data.loss(log(tau)) == pytest.approx(expected, rel=1e-7)
    assert data.total == int((labels != IGNORED).sum()) and data.num_inputs == 12
    tuned = la.tuned([(new, labels)])
    assert "12 validation inputs" in tuned.summary()
    penalised = [
        la.with_prior(prior).evaluate([(new, labels)]).posterior.scores["nll"]
        + 0.3 * (log(prior / PRIOR) / log(10)) ** 2 / data.total
        for prior in (tuned.prior_precision, tuned.prior_precision * 1.3, tuned.prior_precision / 1.3)
    ]
    assert min(penalised) == penalised[0]


def test_validation_tunes_the_noise_of_all_entries():
    model, x = network("sequence"), inputs_of("sequence", 20)
    la = SubspaceLaplace.paper(model, "regression", 4).fit([(x, model(x).detach() + 0.1 * drawn(20, 4, C))])
    new = inputs_of("sequence", 15, seed=5)
    targets = model(new).detach() + 0.3 * drawn(15, 4, C, seed=6)
    mask = torch.rand(15, 4, C, generator=torch.Generator().manual_seed(6)) < 0.7
    data = pooled_validation(la._state, [(new, targets.where(mask, 50.0), mask)], Stopwatch())
    tau, sigma = float(data.taus[12]), la.noise_std
    loss, factor = data.loss_and_factor(log(tau), 0.25)
    # V(τ)/scale of the posterior with this τ, and σ², both times c².
    spread = la.with_prior(tau / sigma**2).functional_variance(new)[mask] + sigma**2
    squares = (targets - model(new).detach())[mask].square()

    def penalised(c):
        density = -0.5 * (squares / (c**2 * spread) + (2 * pi * c**2 * spread).log()).sum()
        decades = log(c) / log(10)
        return -(float(density) - NOISE_PULL * (decades**2 + (0.25 - 2 * decades) ** 2)) / int(mask.sum())

    assert loss == pytest.approx(penalised(factor), rel=1e-7)
    assert penalised(factor) < min(penalised(factor * 1.02), penalised(factor / 1.02))
    tuned = la.tuned([(new, targets.where(mask, 50.0), mask)])
    assert 0.2 < tuned.noise_std < 0.4


def test_without_room_for_leave_one_out_the_evidence_decides_and_the_summary_says_so():
    model, x, y = network("sequence"), inputs_of("sequence", 40), labels_of("sequence", 40)
    small = Resources(memory_budget=2**18)
    la = SubspaceLaplace(model, likelihood_of("sequence"), 4, resources=small).fit([(x, y)])
    assert "leave-one-out of so many outputs does not fit into the memory budget" in la.summary()
    by_evidence = SubspaceLaplace(model, likelihood_of("sequence"), 4, prior_precision="evidence").fit([(x, y)])
    assert la.prior_precision == pytest.approx(by_evidence.prior_precision, rel=1e-6)


# Files and more data --------------------------------------------------------------------------------------------------


@BOTH
def test_saved_posteriors_predict_the_same(kind, tmp_path):
    model, x = network(kind), inputs_of(kind, 60)
    y = plausible_labels(kind, x)
    la = SubspaceLaplace(model, likelihood_of(kind), 4).fit([(x, y)])
    la.save(tmp_path / "posterior.safetensors")
    loaded = SubspaceLaplace.load(tmp_path / "posterior.safetensors", model)
    again = pickle.loads(pickle.dumps(loaded))
    for other in (loaded, again):
        assert torch.allclose(other(x), la(x), rtol=1e-9)
        assert other.likelihood == la.likelihood
        assert other.summary().splitlines()[1:5] == la.summary().splitlines()[1:5]
    assert torch.allclose(loaded.updated([(x, y)])(x), la.updated([(x, y)])(x), rtol=1e-8)


def test_a_likelihood_with_positions_is_restored_from_its_numbers():
    for single, classes in ((likelihood_of("sequence"), 3), (Gaussian(0.3), 1), (Bernoulli(-1), 1)):
        likelihood = AtPositions(single, classes)
        assert restored_likelihood(likelihood.numbers()) == likelihood
        assert likelihood.name == single.name
    assert at_positions(Gaussian(0.3), None) == Gaussian(0.3)


def test_more_data_are_added():
    model, x, y = network("sequence"), inputs_of("sequence"), labels_of("sequence")
    given = {"prior_precision": PRIOR, "subspace_inputs": x}
    both = SubspaceLaplace(model, likelihood_of("sequence"), 5, **given).fit([(x, y)])
    part = SubspaceLaplace(model, likelihood_of("sequence"), 5, **given).fit([(x[:3], y[:3])]).updated([(x[3:], y[3:])])
    P = part.projection_matrix()
    reduced = P.T @ dense_ggn("sequence", model, x, counted(y)) @ P + PRIOR * P.T @ P
    assert torch.allclose(part.functional_variance(x), variance(dense_jacobian(model, x) @ P, reduced), rtol=1e-7)
    assert part.log_marginal_likelihood() != both.log_marginal_likelihood()  # of another P


def test_a_fit_with_a_checkpoint_is_the_same(tmp_path):
    model, x, y = network("sequence"), inputs_of("sequence"), labels_of("sequence")
    one = SubspaceLaplace(model, likelihood_of("sequence"), 4).fit([(x, y)])
    other = SubspaceLaplace(model, likelihood_of("sequence"), 4).fit([(x, y)], checkpoint=tmp_path)
    assert torch.allclose(one(x), other(x), rtol=1e-9)


@pytest.mark.parametrize(
    "projector", ["last-layer", "subset-swag", "subset-diagonal", "lowrank-ggn", "lowrank-diagonal"]
)
def test_other_projectors_see_all_positions(projector):
    model, x, y = network("sequence"), inputs_of("sequence"), labels_of("sequence")
    dim = {} if projector == "last-layer" else {"dim": 4}
    la = SubspaceLaplace.paper(model, likelihood_of("sequence"), projector=projector, prior_precision=PRIOR, **dim)
    la.fit([(x, y)])
    P = la.projection_matrix()
    reduced = P.T @ dense_ggn("sequence", model, x, counted(y)) @ P + PRIOR * P.T @ P
    assert torch.allclose(la.functional_variance(x), variance(dense_jacobian(model, x) @ P, reduced), rtol=1e-6)
    if projector == "last-layer":
        assert la.dim == sum(p.numel() for p in model.last.parameters())


def test_a_dimension_that_captures_a_share_is_found():
    model, x, y = network("sequence"), inputs_of("sequence", 20), labels_of("sequence", 20)
    la = SubspaceLaplace.paper(model, likelihood_of("sequence"), Captured(0.3, at_most=20)).fit([(x, y)])
    assert 0.2 < float(la.captured_share(x)[-1]) <= 1


# Many outputs ---------------------------------------------------------------------------------------------------------


def test_kfac_of_a_wide_layer_keeps_the_diagonal_of_its_output_factor(monkeypatch):
    x, y = inputs_of("sequence"), labels_of("sequence")
    exact = kronecker_ggn(stream_of("sequence", x, y), PRIOR)
    monkeypatch.setattr(kfac_module, "DENSE_OUTPUTS", 2)
    wide = kronecker_ggn(stream_of("sequence", x, y), PRIOR)
    for name in ("last.weight", "last.bias", "first.weight"):
        part = wide.parts[name]
        assert part.output_vectors is None
        assert torch.allclose(part.output_values, exact.parts[name]._output_moment().diagonal(dim1=1, dim2=2))
        assert torch.allclose(part._input_moment(), exact.parts[name]._input_moment())
    # Predictions with it are those of the matrix that it stands for.
    jacobian = next(iter(stream_of("sequence", x, y).linearization.chunks(x)))
    for name, part in wide.parts.items():
        rows = jacobian.blocks[name].rows()
        size = rows.shape[2]
        inverse = part.solve(torch.eye(size, dtype=torch.float64), PRIOR)
        assert torch.allclose(
            inverse @ part.matmul(torch.eye(size).double(), PRIOR), torch.eye(size).double(), atol=1e-9
        )
        assert torch.allclose(part.covariance(jacobian.blocks[name], PRIOR), rows @ inverse @ rows.mT, atol=1e-10)
        turned = part.turn(jacobian.blocks[name]).rows()
        assert torch.allclose(turned @ turned.mT, rows @ rows.mT, atol=1e-10)


def test_rows_that_cannot_fit_are_refused_before_they_are_made(monkeypatch):
    model, x, y = network("segmentation"), inputs_of("segmentation"), labels_of("segmentation")
    options = {"prior_precision": PRIOR, "resources": Resources(memory_budget=1000)}
    la = SubspaceLaplace(model, likelihood_of("segmentation"), 3, complement=Complement("kfac", 1.0), **options)
    la.fit([(x, y)])
    monkeypatch.setattr("sublaplace.runtime.memory.available_bytes", lambda _: 5000)
    with pytest.raises(MemoryError, match=r"18 Jacobian rows of one input with 18 outputs.*complement=None.*outputs=…"):
        la(x)


def test_predictions_that_cannot_fit_are_refused_before_they_are_made(monkeypatch):
    model, x, y = network("segmentation"), inputs_of("segmentation"), labels_of("segmentation")
    la = SubspaceLaplace(model, likelihood_of("segmentation"), 3, prior_precision=PRIOR).fit([(x, y)])
    monkeypatch.setattr("sublaplace.runtime.memory.available_bytes", lambda _: 2000)
    with pytest.raises(MemoryError, match=r"A prediction of 18 outputs for 7 inputs needs .*outputs=\[0, 1\]"):
        la.predict(x)
    with pytest.raises(MemoryError, match=r"covariances of 18 outputs for 7 inputs"):
        la(x, link="mc")
    monkeypatch.setattr("sublaplace.fitting.steps.require", lambda *_: None)
    many = SubspaceLaplace(model, likelihood_of("segmentation"), 3, resources=Resources(curvature_samples=2))
    with pytest.raises(MemoryError, match=r"Kronecker|random combinations of 18 outputs"):
        many.fit([(x, y)])


# Errors ---------------------------------------------------------------------------------------------------------------


def test_positions_without_an_axis_of_classes_are_refused_with_the_ways_to_go_on():
    model, x, y = network("segmentation"), inputs_of("segmentation"), labels_of("segmentation", ignored=False)
    with pytest.raises(ValueError, match=r"returned \(.*Three ways to go on: .*class_dim=1.*one position.*of its own"):
        SubspaceLaplace(model, "classification").fit([(x, y)])


@pytest.mark.parametrize("class_dim", [4, -4, 7])
def test_an_axis_that_the_outputs_lack_is_refused(class_dim):
    model, x, y = network("segmentation"), inputs_of("segmentation"), labels_of("segmentation", ignored=False)
    with pytest.raises(ValueError, match=rf"class_dim={class_dim} is out of range.*\(\d, 3, 2, 3\).*1 … 3"):
        SubspaceLaplace(model, Categorical(class_dim=class_dim)).fit([(x, y)])


@pytest.mark.parametrize(("class_dim", "error"), [(0, ValueError), (1.5, TypeError), (True, TypeError)])
def test_what_cannot_be_an_axis_is_refused(class_dim, error):
    with pytest.raises(error, match="class_dim"):
        Categorical(class_dim=class_dim)


WRONG = {
    "one label per input": (lambda y: y[:, 0, 0], r"one label per position, of shape \(7, 2, 3\).*shape \(7,\)"),
    "turned": (lambda y: y.mT, r"one label per position, of shape \(7, 2, 3\).*shape \(7, 3, 2\)"),
    "numbers": (lambda y: y.double(), "integer labels"),
    "too large": (lambda y: y + 1, r"Labels must lie in 0 … 2, but they range from 1 to 3"),
    "one-hot": (lambda y: F.one_hot(y, 3).movedim(-1, 1), r"of shape \(7, 2, 3\).*shape \(7, 3, 2, 3\)"),
}


@pytest.mark.parametrize("name", WRONG)
def test_targets_that_do_not_belong_to_the_outputs_are_refused(name):
    change, match = WRONG[name]
    model, x, y = network("segmentation"), inputs_of("segmentation"), labels_of("segmentation", ignored=False)
    y[0, 0, :] = torch.arange(3)
    good = SubspaceLaplace(model, Categorical(class_dim=1), 3, prior_precision=PRIOR)
    with pytest.raises(ValueError, match=match):
        good.fit([(x, change(y))])
    good.fit([(x, y)])
    for use in (good.evaluate, good.tuned):
        with pytest.raises(ValueError, match=match):
            use([(x, change(y))])
    with pytest.raises(ValueError, match=match):
        SubspaceLaplace(model, Categorical(class_dim=1), 3).fit([(x, y)], [(x + 1, change(y))])


def test_targets_of_another_shape_than_the_entries_are_refused():
    model, x = network("sequence"), inputs_of("sequence")
    for likelihood in ("regression", "binary"):
        with pytest.raises(ValueError, match=r"outputs have shape \(7, 4, 3\), so targets must be of the same shape"):
            SubspaceLaplace(model, likelihood).fit([(x, torch.ones(N, 4).double())])


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"likelihood": Gaussian("per-output")}, "one σ for all"),
        ({"likelihood": Gaussian((0.1,) * 12)}, "one σ for all"),
        (
            {"likelihood": Gaussian(0.1), "complement": "kfac"},
            r"weight of a complement.*Complement\('kfac', weight=1.0\)",
        ),
    ],
)
def test_what_cannot_work_with_positions_is_refused(options, match):
    model, x = network("sequence"), inputs_of("sequence")
    with pytest.raises(ValueError, match=match):
        SubspaceLaplace(model, dim=3, **options).fit([(x, drawn(N, 4, C))])


def test_bounds_and_wrong_choices_are_refused():
    model, x, y = network("sequence"), inputs_of("sequence"), labels_of("sequence")
    la = SubspaceLaplace(model, likelihood_of("sequence"), 3, prior_precision=PRIOR).fit([(x, y)])
    with pytest.raises(ValueError, match="captured_share"):
        la.bounds(x)
    with pytest.raises(ValueError, match=r"shape \(k,\), or have the shape of the outputs with k classes"):
        la.functional_variance(x, outputs=torch.zeros(N, 2, dtype=torch.long))
    with pytest.raises(ValueError, match="lie in 0 … 2"):
        la.functional_variance(x, outputs=[3])
    with pytest.raises(ValueError, match="2 positions, but the network's outputs have 4"):
        la.functional_variance(x, outputs=torch.zeros(N, 2, 1, dtype=torch.long))
    with pytest.raises(ValueError, match="number of classes, 3"):
        la.predict(x).top(4)
    entries = SubspaceLaplace.paper(model, "binary", 3).fit([(x, (drawn(N, 4, C) > 0).double())])
    with pytest.raises(ValueError, match="prediction of its own"):
        entries.predict(x).top(1)
    with pytest.raises(ValueError, match="epistemic_variance"):
        ood.predictive_entropy(entries.predict(x))


def test_weights_of_positions_belong_to_outputs_with_positions():
    model = nn.Linear(2, 3).double()
    x, y = drawn(6, 2), drawn(6, 3)
    with pytest.raises(ValueError, match="belong to outputs with positions"):
        SubspaceLaplace.paper(model, "regression", 2).fit([(x, y, torch.ones(6, 3))])
    sequence, inputs, labels = network("sequence"), inputs_of("sequence"), labels_of("sequence")
    la = SubspaceLaplace(sequence, likelihood_of("sequence"), 2, prior_precision=PRIOR).fit([(inputs, labels)])
    with pytest.raises(ValueError, match="without weights"):
        la.evaluate([(inputs, labels, torch.full((N, 4), 0.5))])


def test_layouts_are_turned_back():
    for shape, class_dim in (((4, 3), -1), ((3, 2, 5), 1), ((2, 3, 5), 2), ((2, 5), None)):
        outputs = drawn(6, *shape)
        layout = OutputLayout.of(tuple(outputs.shape), class_dim)
        assert torch.equal(layout.arranged(layout.flat(outputs)), outputs)
        assert layout.num_outputs == outputs[0].numel()
        matrix = torch.einsum("na,nb->nab", layout.flat(outputs), layout.flat(outputs))
        expected = outputs.flatten(1)[:, :, None] * outputs.flatten(1)[:, None, :]
        assert torch.equal(layout.matrix(matrix).reshape(6, *expected.shape[1:]), expected)
