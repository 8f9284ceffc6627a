"""Gradients of predictions with respect to inputs: equal to finite differences, and the same values as without them."""

import pytest
import torch
from networks import NETWORKS, make
from sensitive import untouched
from test_laplace import labels, loader
from torch import nn

from sublaplace import Complement, Gaussian, SubspaceLaplace
from sublaplace.jacobians.linearization import Linearization

STEP = 1e-5
TOLERANCE = 1e-6
POSTERIORS = {
    "default": lambda model, kind: SubspaceLaplace(model, kind, dim=4, prior_precision=0.7),
    "paper": lambda model, kind: SubspaceLaplace.paper(model, kind, dim=4, prior_precision=0.7),
    "last-layer": lambda model, kind: SubspaceLaplace(model, kind, projector="last-layer", prior_precision=0.7),
    "full": lambda model, kind: SubspaceLaplace(model, kind, projector="full", prior_precision=0.7),
    "kfac": lambda model, kind: SubspaceLaplace(
        model, kind, projector=None, complement=Complement("kfac", weight=1.0), prior_precision=0.7
    ),
    "diagonal outside": lambda model, kind: SubspaceLaplace(
        model, kind, dim=4, complement=Complement("diagonal", weight=1.0), prior_precision=0.7
    ),
    "subset": lambda model, kind: SubspaceLaplace(
        model, kind, dim=4, projector="subset-magnitude", prior_precision=0.7
    ),
    "a λ per layer": lambda model, kind: SubspaceLaplace(
        model, kind, dim=4, prior_structure="layer", prior_precision="evidence"
    ),
}
QUANTITIES = {
    "mean": lambda la, x: la.predict(x).mean,
    "variance": lambda la, x: la.predict(x).variance,
    "covariance": lambda la, x: la.predict(x).covariance,
    "joint covariance": lambda la, x: la.functional_covariance(x, joint=True),
    "function samples": lambda la, x: la.functional_samples(x, 3),
}
PROBABILITIES = {
    link: (lambda la, x, link=link: la.predict(x, link=link).probabilities) for link in ("pairwise", "probit", "mc")
}
SMOOTH = {
    "mlp": (lambda: nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 5), nn.SiLU(), nn.Linear(5, 2)), (3,)),
    "cnn": (
        lambda: nn.Sequential(
            nn.Conv2d(1, 3, 3, padding=1), nn.Softplus(), nn.AvgPool2d(2), nn.Conv2d(3, 4, 2), nn.Tanh(), nn.Flatten()
        ).append(nn.Linear(4, 2)),
        (1, 4, 4),
    ),
    "many outputs": (
        lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 8)),
        (3,),
    ),
}


def smooth(name, n):
    build, shape = SMOOTH[name]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return build().double(), torch.randn(n, *shape, dtype=torch.float64)


def fitted(name, posterior, kind="classification"):
    model, inputs = smooth(name, 12)
    targets = labels(model, inputs) if kind == "classification" else model(inputs).detach().cos()
    return POSTERIORS[posterior](model, kind).fit(loader(inputs, targets)), smooth(name, 14)[1][12:]


def gradient(quantity, la, x):
    """The gradient of a fixed random combination of all entries, and the entries."""
    x = x.clone().requires_grad_()
    found = quantity(la, x)
    (result,) = torch.autograd.grad((found * weights(found)).sum(), x)
    return result, found.detach()


def weights(found):
    return torch.randn(found.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


def directions(x):
    """Orthonormal directions in which x moves, at most eight: (k, …)."""
    drawn = torch.randn(x.numel(), min(8, x.numel()), generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    return torch.linalg.qr(drawn).Q.T.reshape(-1, *x.shape)


def differences(quantity, la, x):
    """The same gradient along the directions, by central differences: (k,)."""
    moved = [(quantity(la, x + STEP * d), quantity(la, x - STEP * d)) for d in directions(x)]
    return torch.stack([((up - down) * weights(up)).sum() / (2 * STEP) for up, down in moved])


def along(gradients):
    return (directions(gradients) * gradients).flatten(1).sum(1)


def require_equal(quantity, la, x):
    found, values = gradient(quantity, la, x)
    ordinary = quantity(la, x)
    assert not ordinary.requires_grad
    assert torch.allclose(values, ordinary, rtol=1e-10, atol=1e-12 * float(ordinary.abs().max()))
    expected = differences(quantity, la, x)
    assert expected.abs().max() > 1e-4  # otherwise there is nothing to compare
    assert (along(found) - expected).abs().max() <= TOLERANCE * max(1.0, float(expected.abs().max()))


@pytest.mark.parametrize("posterior", POSTERIORS)
@pytest.mark.parametrize("name", SMOOTH)
def test_gradients_equal_finite_differences(name, posterior):
    la, x = fitted(name, posterior)
    for quantity in QUANTITIES.values():
        require_equal(quantity, la, x)


@pytest.mark.parametrize("link", PROBABILITIES)
def test_gradients_of_probabilities_equal_finite_differences(link):
    la, x = fitted("mlp", "default")
    require_equal(PROBABILITIES[link], la, x)


@pytest.mark.parametrize("noise", [Gaussian(), Gaussian("per-output")], ids=["one σ", "a σ per output"])
def test_gradients_for_regression_equal_finite_differences(noise):
    la, x = fitted("mlp", "default", noise)
    for quantity in QUANTITIES.values():
        require_equal(quantity, la, x)
    require_equal(lambda la, x: torch.stack(la(x)[:1]), la, x)
    require_equal(lambda la, x: la.functional_variance(x, outputs=[1]), la, x)
    require_equal(lambda la, x: torch.stack(la.predict(x).interval(0.9)), la, x)


@pytest.mark.parametrize(
    "name", [name for name in NETWORKS if name not in ("embedding", "tied-weights", "keyword-inputs")]
)
def test_every_architecture_has_gradients(name):
    model, inputs = make(name, 8)
    la = POSTERIORS["default"](model, "classification").fit(loader(inputs, labels(model, inputs)))
    x = make(name, 2, seed=5)[1]
    require_equal(QUANTITIES["variance"], la, x)


def test_inputs_of_several_tensors_have_gradients_each():
    model, inputs = make("keyword-inputs", 8)
    la = POSTERIORS["default"](model, "classification").fit(loader(inputs, labels(model, inputs)))
    x = make("keyword-inputs", 2, seed=5)[1]
    require_equal(lambda la, left: la.predict({**x, "left": left}).variance, la, x["left"])
    require_equal(lambda la, right: la.predict({**x, "right": right}).variance, la, x["right"])


class ByHand(nn.Module):
    """Its parameter takes the general path, one input at a time: the control flow depends on the input's values."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor([0.3, -0.7, 1.1]))
        self.head = nn.Linear(3, 2)

    def forward(self, x):
        scale = self.scale[:3].exp()
        return self.head(torch.stack([row * scale if row.sum().item() > 0 else (row * scale).sin() for row in x]))


def test_parameters_of_the_slow_path_have_gradients():
    torch.manual_seed(0)
    model = ByHand().double()
    inputs = torch.randn(8, 3, dtype=torch.float64)
    la = POSTERIORS["default"](model, "classification").fit(loader(inputs, labels(model, inputs)))
    assert not la._state.linearization._current.general_batched
    require_equal(QUANTITIES["variance"], la, torch.randn(3, 3, dtype=torch.float64))


def test_predictions_have_no_graph_unless_it_is_asked_for():
    la, x = fitted("mlp", "default")
    x.requires_grad_()
    for quantity in QUANTITIES.values():
        assert quantity(la, x).requires_grad
        with torch.no_grad():
            assert not quantity(la, x).requires_grad
        with torch.inference_mode():
            assert not quantity(la, x).requires_grad


def test_an_input_of_zeros_has_finite_gradients():
    """The root of a variance that vanishes there has none, so the variance must not be taken by its root."""
    for posterior in POSTERIORS:
        la, x = fitted("mlp", posterior)
        found, _ = gradient(QUANTITIES["variance"], la, torch.zeros_like(x))
        assert found.isfinite().all()
        expected = differences(QUANTITIES["variance"], la, torch.zeros_like(x))
        assert torch.allclose(along(found), expected, atol=1e-7)


def test_a_backward_pass_leaves_the_model_as_it_was():
    la, x = fitted("mlp", "default")
    slow = ByHand().double()
    inputs = torch.randn(8, 3, dtype=torch.float64)
    other = POSTERIORS["default"](slow, "classification").fit(loader(inputs, labels(slow, inputs)))
    for fit, model in ((la, la.model), (other, slow)):
        with untouched(model):
            given = x.clone().requires_grad_()
            prediction = fit.predict(given)
            (prediction.variance.sum() + prediction.mean.sum() + prediction.covariance.sum()).backward()
            assert given.grad is not None and given.grad.abs().max() > 0


def test_gradients_are_those_of_each_input_alone():
    """Several chunks and batches give the same gradients as one."""
    la, x = fitted("mlp", "default")
    whole, _ = gradient(QUANTITIES["variance"], la, x)
    given = x.clone().requires_grad_()
    found = la.functional_variance([given[:1], given[1:]])
    (parts,) = torch.autograd.grad((found * weights(found)).sum(), given)
    assert torch.allclose(parts, whole, rtol=1e-10)


def test_bounds_can_be_differentiated():
    la, x = fitted("mlp", "paper")
    require_equal(lambda la, x: la.bounds(x).upper, la, x)


def test_the_last_layer_needs_no_backward_pass_for_its_rows():
    la, x = fitted("mlp", "last-layer")
    engine: Linearization = la._state.linearization.differentiable()
    engine.jacobian(x.clone().requires_grad_(), wanted=la._state.posterior.wanted)
    assert engine.passes == la._state.linearization.passes


@pytest.mark.parametrize("posterior", POSTERIORS)
@pytest.mark.parametrize("size", [1, 3, 9])  # alone, as one input with more outputs, and one group after another
def test_groups_have_their_joint_covariances(posterior, size):
    la, _ = fitted("mlp", posterior)
    groups = torch.randn(3, size, 3, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    means, covariances = la.predict_groups(groups)
    assert means.shape == (3, size, 2)
    for group, mean, covariance in zip(groups, means, covariances, strict=True):
        expected = la.functional_covariance(group, joint=True)
        assert torch.allclose(mean, la.model(group), rtol=1e-10)
        assert torch.allclose(covariance, expected, rtol=1e-8, atol=1e-10 * float(expected.abs().max()))
    if posterior in ("default", "full"):
        for which in (0, 1):
            require_equal(lambda la, x, which=which: la.predict_groups(x)[which], la, groups)


def test_groups_of_another_shape_are_refused():
    la, x = fitted("mlp", "default")
    for wrong in (x, x[:0].unsqueeze(1), [x]):
        with pytest.raises(ValueError, match=r"one tensor \(b, q, …\)"):
            la.predict_groups(wrong)
