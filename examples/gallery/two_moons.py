"""# Two moons: doubt away from the data

The plain network is sure of its class almost everywhere, even far from all data. The posterior is sure where
there are data, and doubts elsewhere. With KFAC outside the subspace it doubts more, because a subspace built from
training inputs alone holds little of the uncertainty far away.
"""

import torch
from matplotlib.figure import Figure
from pictures import BLUE, RED, save
from sklearn.datasets import make_moons
from torch import nn

from sublaplace import Complement, SubspaceLaplace

torch.manual_seed(0)
points, kinds = make_moons(200, noise=0.15, random_state=0)
x, y = torch.tensor(points).float(), torch.tensor(kinds)
model = nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2))
optimizer = torch.optim.Adam(model.parameters(), 0.005, weight_decay=1e-4)
for _ in range(800):
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()

subspace, with_kfac = (
    SubspaceLaplace(model, "classification", dim=60, complement=complement, prior_precision="evidence").fit([(x, y)])
    for complement in (None, Complement("kfac", weight=1.0))
)

side = torch.linspace(-5, 6, 120)
grid = torch.cartesian_prod(side, side - 0.5)
with torch.no_grad():
    panels = {
        "plain network": model(grid).softmax(1),
        "subspace, s = 60": subspace(grid),
        "subspace + KFAC outside": with_kfac(grid),
    }
figure = Figure(figsize=(11.5, 3.8), layout="constrained")
for ax, (title, probabilities) in zip(figure.subplots(1, 3, sharey=True), panels.items(), strict=True):
    confidence = probabilities.amax(1).view(120, 120).T
    shown = ax.contourf(side, side - 0.5, confidence, levels=torch.linspace(0.5, 1, 11).tolist(), cmap="cividis")
    for kind, (colour, marker) in enumerate([(BLUE, "o"), (RED, "^")]):
        ax.scatter(*x[y == kind].T, s=9, color=colour, marker=marker, edgecolors="white", linewidths=0.3)
    ax.set(title=title, xlabel="x₁")
    share = float((probabilities.amax(1) > 0.95).float().mean())
    print(f"{title}: more than 95 % sure on {share:.0%} of the square")
figure.axes[0].set_ylabel("x₂")
figure.colorbar(shown, ax=figure.axes, label="probability of the predicted class")
save(figure, "two_moons")
