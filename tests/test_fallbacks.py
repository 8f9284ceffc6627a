"""Models that plain automatic differentiation can train but whose calls cannot be recorded take the general path."""

import pytest
import torch
from dense_reference import dense_jacobian, dense_outputs, softmax_hessians
from sensitive import refused, untouched
from test_laplace import labels, loader
from torch import nn
from torch.utils.checkpoint import checkpoint

from sublaplace import Linearization, SubspaceLaplace

PRIOR = 0.7


class Checkpointed(nn.Module):
    """Drops activations, and computes them again in the backward pass."""

    def __init__(self, reentrant=False):
        super().__init__()
        self.first, self.second, self.head = nn.Linear(3, 5), nn.Linear(5, 5), nn.Linear(5, 3)
        self.reentrant = reentrant

    def _inner(self, x):
        return self.first(x).tanh()

    def forward(self, x):
        x = self._inner(x) if self.reentrant else checkpoint(self._inner, x, use_reentrant=False)
        return self.head(checkpoint(lambda value: self.second(value).tanh(), x, use_reentrant=self.reentrant))


class SparseGradients(nn.Module):
    def __init__(self, kind=nn.Embedding):
        super().__init__()
        self.table, self.head = kind(7, 4, sparse=True), nn.Linear(4, 3)

    def forward(self, ids):
        x = self.table(ids)
        return self.head((x.mean(1) if x.ndim == 3 else x).tanh())


class OwnAutocast(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.head = nn.Linear(3, 5), nn.Linear(5, 3)

    def forward(self, x):
        with torch.autocast("cpu", torch.float16):
            return self.head(self.first(x).tanh()).float()


def mlp():
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 3))


def numbers(n=8):
    return torch.randn(n, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def tokens(n=8):
    return torch.randint(0, 7, (n, 4), generator=torch.Generator().manual_seed(1))


MODELS = {
    "checkpoint": (Checkpointed, numbers),
    "sparse embedding": (SparseGradients, tokens),
    "sparse bag": (lambda: SparseGradients(nn.EmbeddingBag), tokens),
    "scripted": (lambda: torch.jit.script(mlp()), numbers),
    "traced": (lambda: torch.jit.trace(mlp(), torch.zeros(2, 3)), numbers),
    "scripted part": (lambda: nn.Sequential(torch.jit.script(mlp()), nn.Tanh(), nn.Linear(3, 3)), numbers),
}


def made(build):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return build()


def jacobian(model, inputs):
    """(nC, p), one backward pass after the other, as any training would do it."""
    parameters, rows = [p for p in model.parameters() if p.requires_grad], []
    for k in range(model(inputs[:1]).shape[1]):
        for i in range(len(inputs)):
            model.zero_grad()
            model(inputs[i : i + 1])[0, k].backward()
            flat = [torch.zeros(p.numel()) if p.grad is None else p.grad.to_dense().flatten() for p in parameters]
            rows.append((i, k, torch.cat([part.double() for part in flat])))
    model.zero_grad()
    return torch.stack([row for _, _, row in sorted(rows, key=lambda entry: entry[:2])])


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
@pytest.mark.parametrize("name", MODELS)
def test_models_without_records_of_their_calls_give_the_covariance_of_brute_force(name):
    build, inputs = MODELS[name]
    model, x = made(build).double(), inputs()
    with untouched(model):
        la = SubspaceLaplace.paper(model, "classification", projector="full", prior_precision=PRIOR)
        found = la.fit(loader(x, labels(model, x))).functional_covariance(x, joint=True)
    J = jacobian(model, x)
    hessians = torch.block_diag(*softmax_hessians(dense_outputs(model, x)))
    expected = J @ torch.linalg.solve(J.T @ hessians @ J + PRIOR * torch.eye(J.shape[1], dtype=torch.float64), J.T)
    assert torch.allclose(found, expected, rtol=1e-8, atol=1e-10)


def test_a_network_with_its_own_autocast_is_differentiated_as_it_runs():
    model, x = made(OwnAutocast), numbers().float()
    with untouched(model):
        la = SubspaceLaplace.paper(model, "classification", projector="full", prior_precision=PRIOR)
        found = la.fit(loader(x, labels(model, x))).functional_covariance(x, joint=True)
    J = jacobian(model, x)
    with torch.no_grad():
        hessians = torch.block_diag(*softmax_hessians(model(x).double()))
    expected = J @ torch.linalg.solve(J.T @ hessians @ J + PRIOR * torch.eye(J.shape[1], dtype=torch.float64), J.T)
    assert torch.allclose(found.double(), expected, rtol=1e-2, atol=1e-2 * float(expected.abs().max()))  # 11 bits


def test_every_projector_works_on_the_general_path():
    model, x = made(Checkpointed).double(), numbers()
    data = loader(x, labels(model, x))
    full = SubspaceLaplace.paper(model, "classification", projector="full").fit(data).functional_variance(x)
    for projector in ("lowrank-kfac", "lowrank-ggn", "subset-diagonal"):
        found = SubspaceLaplace.paper(model, "classification", dim=6, projector=projector).fit(data)
        assert (found.functional_variance(x) <= full * (1 + 1e-9)).all()
    with_rest = SubspaceLaplace(model, "classification", dim=6, prior_precision=1.0).fit(data)
    assert (with_rest.functional_variance(x) > 0).all()


# Refused, with the reason ---------------------------------------------------------------------------------------------


class WithoutGradients(nn.Module):
    def __init__(self, mode):
        super().__init__()
        self.net, self.mode = mlp(), mode

    def forward(self, x):
        with self.mode():
            return self.net(x)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_forward_pass_without_gradients_is_refused(mode):
    model, x = made(lambda: WithoutGradients(mode)).double(), numbers()
    with refused(model, ValueError, "no gradient", "torch.no_grad", "inference_mode", "detach"):
        SubspaceLaplace.paper(model, "classification", dim=4).fit(loader(x, torch.arange(8) % 3))


def test_a_model_made_in_inference_mode_is_refused():
    with torch.inference_mode():
        model = made(mlp)
    with pytest.raises(ValueError, match=r"'0\.weight' was made in torch\.inference_mode.*outside"):
        SubspaceLaplace.paper(model, "classification", dim=4)


def test_a_network_that_cannot_be_differentiated_is_refused_with_the_words_of_torch():
    model, x = made(lambda: Checkpointed(reentrant=True)).double(), numbers()
    with refused(model, ValueError, "cannot be differentiated", "use_reentrant=False"):
        SubspaceLaplace.paper(model, "classification", dim=4).fit(loader(x, torch.arange(8) % 3))


class Branching(nn.Module):
    """Uses a parameter without a rule for some inputs alone."""

    def __init__(self):
        super().__init__()
        self.scale, self.head = nn.Parameter(torch.tensor([0.3, -0.7, 1.1])), nn.Linear(3, 2)

    def forward(self, x):
        return self.head(torch.stack([row * self.scale[:3].exp() if row.sum().item() > 0 else row.sin() for row in x]))


def test_a_parameter_that_no_probed_input_uses_has_its_rows():
    torch.manual_seed(0)
    model, x = Branching().double(), torch.randn(12, 3, dtype=torch.float64)
    x = x[x.sum(1).argsort()]  # the first three, which are probed, do not use it
    assert x[2].sum() < 0 < x[-1].sum()
    linearization = Linearization(model)
    linearization.jacobian(x[:3])
    assert torch.allclose(linearization.jacobian(x).dense_rows(), dense_jacobian(model, x), rtol=1e-10)
    assert "scale" in linearization.unusual_parameters()
