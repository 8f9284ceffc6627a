"""# Digits, and rejected predictions

A network that may say "I do not know" should be right more often about the rest. Test images are sorted by
the probability of the predicted class; the curve is the accuracy on the images that are kept. Few training images
and no weight decay make the plain network overconfident.

The posteriors, with λ tuned on validation data, have a lower NLL and a lower ECE than the plain network. They sort
predictions no better than it does.
"""

import torch
from matplotlib.figure import Figure
from pictures import BLUE, GREY, RED, save
from sklearn.datasets import load_digits
from torch import Tensor, nn

from sublaplace import Complement, SubspaceLaplace, metrics

torch.manual_seed(0)
pixels, digits = load_digits(return_X_y=True)
order = torch.randperm(len(pixels))
x, y = (torch.tensor(pixels).float() / 16)[order], torch.tensor(digits)[order]
train, validation, test = slice(0, 300), slice(300, 500), slice(500, None)
model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 10))
optimizer = torch.optim.Adam(model.parameters(), 0.01)
for _ in range(300):
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(x[train]), y[train]).backward()
    optimizer.step()

with torch.no_grad():
    shown = {"plain network": (model(x[test]).softmax(1), GREY, ":")}
for name, complement, colour, style in (
    ("subspace, s = 100", None, RED, "-"),
    ("with KFAC outside", Complement("kfac", weight=1.0), BLUE, "--"),
):
    la = SubspaceLaplace(model, "classification", dim=100, complement=complement, prior_precision=1.0)
    la = la.fit([(x[train], y[train])]).tuned([(x[validation], y[validation])])
    shown[name] = (la(x[test]), colour, style)


def accuracy_of_the_surest(probabilities: Tensor) -> Tensor:
    """Return the accuracy on the k surest predictions, for every k."""
    wrong = (probabilities.argmax(1) != y[test]).double()
    return 1 - metrics.rejection_curve(wrong, 1 - probabilities.amax(1).double()).risk


figure = Figure(figsize=(6.5, 4), layout="constrained")
ax = figure.subplots()
for name, (probabilities, colour, style) in shown.items():
    curve = accuracy_of_the_surest(probabilities)
    coverage = torch.arange(1, len(curve) + 1) / len(curve)
    ax.plot(100 * coverage[60:], 100 * curve[60:], color=colour, ls=style, lw=2, label=name)
    kept = int(0.8 * len(curve))
    scores = (metrics.nll(probabilities, y[test]), metrics.ece(probabilities, y[test]))
    print(f"{name}: NLL {scores[0]:.3f}, ECE {scores[1]:.3f}, accuracy on the surest 80 %: {curve[kept]:.3f}")
ax.set(xlabel="predictions that are kept, %", ylabel="accuracy on them, %")
ax.spines[["top", "right"]].set_visible(False)
ax.legend(frameon=False)
save(figure, "rejected_predictions")
