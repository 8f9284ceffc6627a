"""# One dimension, compared with a Gaussian process

Forty points lie on both sides of a gap. Three models predict what lies in between: the subspace posterior of a
small network (s = 20 of 2,701 parameters), the full Laplace approximation of the same network, and a Gaussian
process. The bands are mean ± 2 standard deviations, noise included.

The subspace is built from inputs over the whole range, which need no labels.
"""

import numpy as np
import torch
from matplotlib.figure import Figure
from pictures import BLUE, GREEN, GREY, RED, save
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import RBF, ConstantKernel, WhiteKernel
from torch import nn

from sublaplace import Gaussian, SubspaceLaplace

NOISE, PRIOR = 0.15, 1.0

torch.manual_seed(0)
x = torch.cat([torch.linspace(-3, -1, 20), torch.linspace(1, 3, 20)])[:, None].double()
y = torch.sin(2 * x) + NOISE * torch.randn_like(x)
grid = torch.linspace(-4.5, 4.5, 300, dtype=torch.float64)[:, None]

model = nn.Sequential(nn.Linear(1, 50), nn.Tanh(), nn.Linear(50, 50), nn.Tanh(), nn.Linear(50, 1)).double()
# The mean squared error is 2σ²/N times the negative log-likelihood, so this weight decay is the prior's λ.
optimizer = torch.optim.Adam(model.parameters(), 0.005, weight_decay=PRIOR * 2 * NOISE**2 / len(x))
for _ in range(3000):
    optimizer.zero_grad()
    nn.functional.mse_loss(model(x), y).backward()
    optimizer.step()

likelihood = Gaussian(NOISE)
subspace = SubspaceLaplace.paper(model, likelihood, dim=20, prior_precision=PRIOR, subspace_inputs=grid)
full = SubspaceLaplace.paper(model, likelihood, prior_precision=PRIOR, projector="full")
for la in (subspace, full):
    la.fit([(x, y)])
process = GaussianProcessRegressor(ConstantKernel() * RBF() + WhiteKernel(NOISE**2), random_state=0).fit(x, y[:, 0])


def band(la: SubspaceLaplace) -> tuple[np.ndarray, np.ndarray]:
    """Return mean and standard deviation over the grid."""
    prediction = la.predict(grid)
    return prediction.mean[:, 0].numpy(), prediction.total[:, 0, 0].sqrt().numpy()


figure = Figure(figsize=(11, 3.6), layout="constrained")
panels = {
    "subspace, s = 20": (*band(subspace), RED),
    "full Laplace, p = 2,701": (*band(full), BLUE),
    "Gaussian process": (*process.predict(grid, return_std=True), GREEN),
}
for ax, (title, (mean, deviation, colour)) in zip(figure.subplots(1, 3, sharey=True), panels.items(), strict=True):
    ax.fill_between(grid[:, 0], mean - 2 * deviation, mean + 2 * deviation, color=colour, alpha=0.25, lw=0)
    ax.plot(grid, mean, color=colour)
    ax.plot(grid, torch.sin(2 * grid), color=GREY, ls=":", label="truth")
    ax.plot(x, y, "k.", ms=4, label="data")
    ax.set(title=title, xlabel="input x", ylim=(-4, 4))
    ax.spines[["top", "right"]].set_visible(False)
    ax.legend(loc="upper center", ncols=2, frameon=False)
figure.axes[0].set_ylabel("target y")
save(figure, "one_dimension")
inside = (grid.abs() < 1)[:, 0]
for title, (_, deviation, _) in panels.items():
    inner, outer = np.mean(deviation[inside]), np.mean(deviation)
    print(f"{title}: mean standard deviation {inner:.2f} in the gap, {outer:.2f} overall")
