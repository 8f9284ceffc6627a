"""Properties that hold for any network, any data and any setting, on random ones."""

import warnings
from itertools import pairwise

import torch
from dense_reference import dense_ggn, dense_jacobian, dense_outputs, full_covariance, softmax_hessians
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_laplace import loader
from torch import nn

from sublaplace import Gaussian, Resources, SubspaceLaplace

NOISE = 0.5
TOLERANCE = 1e-7  # eigenvalue problems with close eigenvalues and λ down to 1e-2, in float64

examples = settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@st.composite
def problems(draw):
    """A random MLP with data, a likelihood, a projector, s and λ."""
    widths = draw(st.lists(st.integers(1, 6), min_size=0, max_size=2))
    features, C, n = draw(st.integers(1, 4)), draw(st.integers(2, 5)), draw(st.integers(1, 9))
    kind = draw(st.sampled_from(["classification", "regression"]))
    seed = draw(st.integers(0, 2**16))
    generator = torch.Generator().manual_seed(seed)
    sizes = [features, *widths, C]
    layers = []
    for fan_in, fan_out in pairwise(sizes):
        linear = nn.Linear(fan_in, fan_out, bias=draw(st.booleans()), dtype=torch.float64)
        with torch.no_grad():
            for p in linear.parameters():
                p.copy_(torch.randn(p.shape, generator=generator, dtype=torch.float64))
        layers += [linear, nn.Tanh()]
    model = nn.Sequential(*layers[:-1])
    x = torch.randn(n, features, generator=generator, dtype=torch.float64)
    new = torch.randn(draw(st.integers(1, 4)), features, generator=generator, dtype=torch.float64)
    if kind == "classification":
        y = torch.randint(0, C, (n,), generator=generator)
    else:
        y = torch.randn(n, C, generator=generator, dtype=torch.float64)
    p = sum(parameter.numel() for parameter in model.parameters())
    options = {
        "likelihood": kind,
        "prior_precision": 10 ** draw(st.floats(-2, 3)),
        "dim": draw(st.integers(1, min(p, n))),  # no more than the rank of one output's Jacobian can be
        "projector": draw(st.sampled_from(["lowrank-kfac", "lowrank-diagonal", "lowrank-ggn", "subset-magnitude"])),
    }
    if kind == "regression":
        options["likelihood"] = Gaussian(NOISE)
    return model, x, y, new, options


def fitted(model, batches, options, **more):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="dim=.* numerical rank")  # small networks may have a small one
        return SubspaceLaplace.paper(model, **options, **more).fit(batches)


def dense_covariance(model, x, new, options):
    """Σ of the full Laplace approximation over the new inputs."""
    outputs = dense_outputs(model, x)
    n, C = outputs.shape
    if options["likelihood"] == "classification":
        hessians = softmax_hessians(outputs)
    else:
        hessians = torch.eye(C).double().expand(n, C, C) / NOISE**2
    ggn = dense_ggn(model, x, hessians)
    precision = ggn + options["prior_precision"] * torch.eye(len(ggn)).double()
    return full_covariance(dense_jacobian(model, new), precision)


def close(value, expected, tolerance=TOLERANCE):
    assert value.shape == expected.shape
    return float((value - expected).abs().max()) <= tolerance * max(float(expected.abs().max()), 1e-300)


@examples
@given(problems())
def test_predictions_have_the_promised_shapes(problem):
    model, x, y, new, options = problem
    la = fitted(model, loader(x, y), options)
    n, C = len(new), dense_outputs(model, new).shape[1]
    assert 1 <= la.dim <= options["dim"]
    assert la.projection_matrix().shape == (la.num_parameters, la.dim)
    assert la.functional_covariance(new).shape == (n, C, C)
    assert la.functional_covariance(new, joint=True).shape == (n * C, n * C)
    assert la.functional_variance(new).shape == (n, C)
    assert la.leading_traces(new).shape == (la.dim,)
    prediction = la.predict(new)
    assert prediction.mean.shape == (n, C)
    if options["likelihood"] == "classification":
        assert la(new).shape == (n, C)
        assert torch.allclose(la(new).sum(1), torch.ones(n).double())
    else:
        mean, covariance = la(new)
        assert mean.shape == (n, C)
        assert covariance.shape == prediction.total.shape == (n, C, C)


@examples
@given(problems())
def test_the_covariance_lies_between_zero_and_the_full_one(problem):
    model, x, y, new, options = problem
    la = fitted(model, loader(x, y), options)
    found = la.functional_covariance(new, joint=True)
    full = dense_covariance(model, x, new, options)
    scale = float(torch.linalg.eigvalsh(full)[-1])
    assert torch.linalg.eigvalsh(found)[0] >= -TOLERANCE * scale
    assert torch.linalg.eigvalsh(full - found)[0] >= -TOLERANCE * scale
    assert (la.leading_traces(new).diff() >= 0).all()


@examples
@given(problems())
def test_marginal_covariances_are_the_blocks_of_the_joint_one(problem):
    model, x, y, new, options = problem
    la = fitted(model, loader(x, y), options)
    joint, single = la.functional_covariance(new, joint=True), la.functional_covariance(new)
    C = single.shape[1]
    blocks = torch.stack([joint[i : i + C, i : i + C] for i in range(0, len(joint), C)])
    assert close(single, blocks)
    assert close(la.functional_variance(new), single.diagonal(dim1=1, dim2=2))
    assert close(la.leading_traces(new)[-1], joint.trace())


@examples
@given(problems(), st.integers(1, 9))
def test_the_posterior_does_not_depend_on_the_batch_size(problem, size):
    model, x, y, new, options = problem
    more = {"subspace_inputs": x} if options["projector"].startswith("lowrank") else {}
    one, other = (fitted(model, loader(x, y, s), options, **more) for s in (len(x), size))
    assert one.dim == other.dim
    assert close(one.functional_covariance(new, joint=True), other.functional_covariance(new, joint=True))


@examples
@given(problems(), st.randoms(use_true_random=False))
def test_the_posterior_does_not_depend_on_the_order_of_the_data(problem, random):
    model, x, y, new, options = problem
    order = random.sample(range(len(x)), len(x))
    one, other = (fitted(model, loader(x[i], y[i], 2), options) for i in (list(range(len(x))), order))
    assert close(one.functional_covariance(new, joint=True), other.functional_covariance(new, joint=True))


@examples
@given(problems(), st.randoms(use_true_random=False))
def test_predictions_follow_a_permutation_of_their_inputs(problem, random):
    model, x, y, new, options = problem
    la = fitted(model, loader(x, y), options)
    order = random.sample(range(len(new)), len(new))
    one, other = la.predict(new), la.predict(new[order])
    assert close(other.mean, one.mean[order])
    assert close(other.covariance, one.covariance[order])
    if one.has_probabilities:
        assert close(other.probabilities, one.probabilities[order])


@examples
@given(problems())
def test_predictions_do_not_depend_on_how_the_inputs_are_batched(problem):
    model, x, y, new, options = problem
    la = fitted(model, loader(x, y), options)
    whole, single = la.predict(new), la.predict([new[i : i + 1] for i in range(len(new))])
    assert close(single.mean, whole.mean)
    assert close(single.covariance, whole.covariance)
    little, projection = Resources(memory_budget=1), la._subspace().projection
    small = fitted(model, loader(x, y), options | {"projector": lambda _: projection}, resources=little)
    assert close(small.functional_covariance(new), whole.covariance)
    if len(model) > 1 or options["likelihood"] == "classification":
        # The outputs of a single layer under equal noise are alike: which of their directions leads, rounding decides.
        small = fitted(model, loader(x, y), options, resources=little)
        assert close(small.functional_covariance(new), whole.covariance)


@examples
@given(problems(), st.floats(0.1, 10))
def test_more_prior_precision_means_less_uncertainty(problem, more):
    model, x, y, new, options = problem
    la = fitted(model, loader(x, y), options)
    other = la.with_prior(options["prior_precision"] * (1 + more))
    assert (other.functional_variance(new) <= la.functional_variance(new) * (1 + TOLERANCE)).all()
