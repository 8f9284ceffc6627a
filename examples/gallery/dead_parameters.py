"""# Which parameters carry the uncertainty

A ReLU unit that is never active makes all of its parameters dead: no output depends on them, so their
posterior is the prior. They have the largest variance of all. A projector that takes the parameters of
largest variance (`subset-diagonal`) therefore takes only dead ones. Low-rank subspaces avoid them: a direction
without effect on the outputs has no share in their covariance.
"""

import torch
from matplotlib.figure import Figure
from pictures import AMBER, RED, SKY, save
from sklearn.datasets import load_diabetes
from torch import nn

from sublaplace import Jacobians, Linearization, SubspaceLaplace

torch.manual_seed(0)
table, progression = load_diabetes(return_X_y=True)
x = torch.tensor(table / table.std(0)).float()
y = torch.tensor((progression - progression.mean()) / progression.std()).float()[:, None]
model = nn.Sequential(nn.Linear(10, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 1))
optimizer = torch.optim.Adam(model.parameters(), 0.01, weight_decay=1e-2)
for _ in range(400):
    optimizer.zero_grad()
    nn.functional.mse_loss(model(x), y).backward()
    optimizer.step()

largest = torch.zeros(sum(p.numel() for p in model.parameters()))
for jacobian in Jacobians(Linearization(model), x):
    largest = torch.maximum(largest, jacobian.dense_rows().abs().amax(0))
dead = float((largest == 0).float().mean())
print(f"{dead:.0%} of {len(largest):,} parameters are dead")

figure = Figure(figsize=(10.5, 3.8), layout="constrained")
left, right = figure.subplots(1, 2)
left.semilogy(largest.sort(descending=True).values.clamp_min(1e-9), color=RED)
left.set(xlabel="parameters, sorted", ylabel="largest |∂f/∂θ| over the data", title=f"{dead:.0%} have no effect at all")
for name, colour, style in (
    ("lowrank-kfac", RED, "-"),
    ("subset-magnitude", AMBER, "--"),
    ("subset-diagonal", SKY, "--"),
):
    la = SubspaceLaplace.paper(model, "regression", projector=name, dim=200).fit([(x, y)])
    trace = la.leading_traces(x)
    right.plot(range(1, len(trace) + 1), trace, color=colour, ls=style, lw=2, label=name)
    print(f"{name}: trace {float(trace[-1]):.3g} at s = {la.dim}")
right.set(xlabel="dimension s", ylabel="variance that the subspace holds", title="The largest variances are of no use")
right.legend(frameon=False)
for ax in (left, right):
    ax.spines[["top", "right"]].set_visible(False)
save(figure, "dead_parameters")
