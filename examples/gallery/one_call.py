"""# One call each: the pictures of sublaplace.plot

Each panel is one call with a fitted posterior and a loader. Top: the bands of a regression in one dimension, with the
ends between which the full approximation's interval lies; the guaranteed share of the full variance; the coverage of
intervals. Bottom: reliability and rejection for digits, and rejection for the regression.
"""

import matplotlib

matplotlib.use("Agg")

import torch
from matplotlib import pyplot as plt
from pictures import save
from sklearn.datasets import load_digits
from torch import nn

from sublaplace import Gaussian, SubspaceLaplace, plot


def fitted_network(model: nn.Module, loss: nn.Module, x: torch.Tensor, y: torch.Tensor, decay: float) -> nn.Module:
    """Return the network, trained."""
    optimizer = torch.optim.Adam(model.parameters(), 0.01, weight_decay=decay)
    for _ in range(1000):
        optimizer.zero_grad()
        loss(model(x), y).backward()
        optimizer.step()
    return model


torch.manual_seed(0)


def observed(n: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs on both sides of a gap, and noisy values."""
    x = (torch.rand(n, 1).double() * 2 + 1) * torch.where(torch.rand(n, 1) < 0.5, -1, 1)
    return x, (2 * x).sin() + 0.15 * torch.randn(n, 1).double()


x, y = observed(40)
curve = nn.Sequential(nn.Linear(1, 50), nn.Tanh(), nn.Linear(50, 50), nn.Tanh(), nn.Linear(50, 1)).double()
fitted_network(curve, nn.MSELoss(), x, y, decay=2 * 0.15**2 / 40)
grid = torch.linspace(-4, 4, 200, dtype=torch.float64)[:, None]
regression = SubspaceLaplace.paper(curve, Gaussian(0.15), 12, subspace_inputs=grid).fit([(x, y)], certify=True)

pixels, digits = load_digits(return_X_y=True)
order = torch.randperm(len(pixels))
images, labels = (torch.tensor(pixels).float() / 16)[order], torch.tensor(digits)[order]
classifier = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 10))
fitted_network(classifier, nn.CrossEntropyLoss(), images[:300], labels[:300], decay=0)
classification = SubspaceLaplace(classifier, "classification", 50)
classification.fit([(images[:300], labels[:300])], [(images[300:500], labels[300:500])])
test = [(images[500:], labels[500:])]

figure, panels = plt.subplots(2, 3, figsize=(13, 8), layout="constrained")
plot.bands(regression, [(x, y)], panels[0, 0], grid=grid, bounds=True).set(title="bands", ylim=(-2.5, 3.5))
plot.captured_share(regression, grid, panels[0, 1]).set_title("captured_share")
plot.coverage(regression, [observed(500)], panels[0, 2]).set_title("coverage")
plot.reliability(classification, test, panels[1, 0]).set_title("reliability")
plot.rejection(classification, test, panels[1, 1]).set_title("rejection, digits")
plot.rejection(regression, [observed(500)], panels[1, 2]).set_title("rejection, regression")
for panel in panels.flat:
    panel.spines[["top", "right"]].set_visible(False)
save(figure, "one_call")
