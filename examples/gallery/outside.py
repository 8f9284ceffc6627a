"""# Outside the subspace: bounds, captured share, KFAC

Left: a subspace of 8 dimensions, and what it guarantees. The standard deviation of the full Laplace approximation lies
in the shaded region. The network is small enough to compute it, which confirms the bounds.

Middle: a network for the diabetes data. The guaranteed share of the full variance of new inputs never exceeds the true
share, and both grow with s. A subspace built from the new inputs themselves, which need no labels, holds far more than
one built from the training inputs.

Right: the divergence of the joint predictive of new inputs from the full approximation's. A subspace alone loses what
lies outside it, and KFAC outside restores much of it. A subspace made for this purpose, with a fitted weight of KFAC,
restores the most.
"""

import warnings

import torch
from matplotlib.figure import Figure
from pictures import BLUE, GREEN, GREY, RED, save
from sklearn.datasets import load_diabetes
from torch import nn

from sublaplace import Complement, Drawn, Gaussian, SubspaceLaplace, metrics

warnings.filterwarnings("ignore", "dim=.* is above the numerical rank")


def trained(x: torch.Tensor, y: torch.Tensor, width: int, noise: float, prior: float, steps: int) -> nn.Sequential:
    """Return the most probable network under a Gaussian prior."""
    torch.manual_seed(0)
    layers = (nn.Linear(x.shape[1], width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 1))
    model = nn.Sequential(*layers).double()
    optimizer = torch.optim.Adam(model.parameters(), 0.005, weight_decay=prior * 2 * noise**2 / len(x))
    for _ in range(steps):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
    return model


figure = Figure(figsize=(12, 3.8), layout="constrained")
bands, shares, divergences = figure.subplots(1, 3)

# One dimension, and the bounds ---------------------------------------------------------------------------------------
NOISE, DIM = 0.15, 8
torch.manual_seed(0)
x = torch.cat([torch.linspace(-3, -1, 20), torch.linspace(1, 3, 20)])[:, None].double()
y = torch.sin(2 * x) + NOISE * torch.randn_like(x)
grid = torch.linspace(-4.5, 4.5, 200, dtype=torch.float64)[:, None]
model = trained(x, y, width=50, noise=NOISE, prior=1.0, steps=3000)
la = SubspaceLaplace.paper(model, Gaussian(NOISE), dim=DIM, subspace_inputs=grid).fit([(x, y)], certify=True)
full = SubspaceLaplace.paper(model, Gaussian(NOISE), projector="full").fit([(x, y)])
bounds = la.bounds(grid)
below, above = (ends[:, 0, 0].sqrt() for ends in (bounds.lower, bounds.upper))
bands.fill_between(grid[:, 0], below, above, color=RED, alpha=0.25, lw=0, label=f"guaranteed, s = {DIM}")
bands.plot(grid, full.functional_variance(grid).sqrt(), color=BLUE, label="full, p = 2,701")
bands.plot(x, 0 * x, "k|", ms=8, label="data")
bands.set(title="standard deviation and its bounds", xlabel="input x", ylim=(0, None))

# Diabetes: share and divergence against s ----------------------------------------------------------------------------
NOISE, PRIOR, DIM = 0.65, 3.0, 100
inputs, targets = load_diabetes(return_X_y=True, scaled=False)
data = torch.tensor(inputs).double()
data = (data - data.mean(0)) / data.std(0)
target = torch.tensor(targets).double()[:, None]
target = (target - target.mean()) / target.std()
order = torch.randperm(len(data), generator=torch.Generator().manual_seed(0))
train, test = order[:300], order[300:]
model = trained(data[train], target[train], width=40, noise=NOISE, prior=PRIOR, steps=1500)
likelihood = Gaussian(NOISE)
batches = [(data[train], target[train])]
new = data[test]
full = SubspaceLaplace.paper(model, likelihood, prior_precision=PRIOR, projector="full").fit(batches)
reference = full.functional_covariance(new, joint=True)
noise = NOISE**2 * torch.eye(len(reference), dtype=torch.float64)


def divergence(la: SubspaceLaplace) -> float:
    """Return the KL divergence of the joint predictive of the new inputs from the full approximation's."""
    return metrics.kl_gaussian(reference + noise, la.functional_covariance(new, joint=True) + noise)


dims = [1, 2, 5, 10, 20, 40, 70, DIM]
for inputs, projector, X, style in (
    ("training inputs, KFAC", "lowrank-kfac", Drawn(300), "-"),
    ("the new inputs, exact GGN", "lowrank-ggn", new, "--"),
):
    la = SubspaceLaplace.paper(model, likelihood, DIM, PRIOR, projector=projector, subspace_inputs=X)
    la.fit(batches, certify=True)
    every = range(1, la.dim + 1)
    shares.plot(every, la.leading_traces(new) / reference.trace(), color=BLUE, ls=style, label=f"true; {inputs}")
    shares.plot(every, la.captured_share(new), color=RED, ls=style, label=f"guaranteed; {inputs}")
shares.set(title="share of the full variance", xlabel="s", ylim=(0, 1.45), yticks=[0, 0.25, 0.5, 0.75, 1])

curves = {
    "lowrank-kfac": (RED, "lowrank-kfac", None),
    "the same, KFAC outside": (GREY, "lowrank-kfac", Complement("kfac", weight=1.0)),
    "lowrank-correction, fitted KFAC outside": (GREEN, "lowrank-correction", Complement("kfac")),
}
for label, (colour, projector, complement) in curves.items():
    la = SubspaceLaplace(
        model,
        likelihood,
        DIM,
        projector=projector,
        complement=complement,
        prior_precision=PRIOR,
        subspace_inputs=Drawn(300),
    ).fit(batches)
    found = [divergence(la.truncated(s)) for s in dims]
    divergences.plot(dims, found, color=colour, marker=".", label=label)
    print(f"{label}: KL {found[0]:.3g} at s = 1, {found[-1]:.3g} at s = {DIM}")
kfac = SubspaceLaplace(
    model, likelihood, projector=None, complement=Complement("kfac", weight=1.0), prior_precision=PRIOR
).fit(batches)
divergences.axhline(divergence(kfac), color=BLUE, ls=":", label="KFAC alone")
divergences.set(title="KL from the full approximation", xlabel="s", yscale="log", ylim=(3, 1000))
for ax in figure.axes:
    ax.spines[["top", "right"]].set_visible(False)
    ax.legend(frameon=False, fontsize=8)
save(figure, "outside")
