"""The shortest use of an installed sublaplace: a fit, a prediction, an evaluation, a training, a file."""

import tempfile
from pathlib import Path

import torch

import sublaplace

torch.manual_seed(0)
inputs = torch.randn(120, 4)
labels = inputs[:, :3].argmax(1)
train, held_out = [(inputs[:90], labels[:90])], [(inputs[90:], labels[90:])]
model = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.Tanh(), torch.nn.Linear(16, 3))
result = sublaplace.train(model, train, "classification", epochs=20, learning_rate=0.02)
assert result.objective[-1] < result.objective[0]
la = sublaplace.SubspaceLaplace(model, result.likelihood, 10).fit(train, held_out)
assert torch.allclose(la(inputs).sum(1), torch.ones(120), atol=1e-5)
path = Path(tempfile.mkdtemp()) / "posterior.safetensors"
la.save(path)
assert torch.equal(sublaplace.SubspaceLaplace.load(path, model)(inputs), la(inputs))
assert (Path(sublaplace.__file__).parent / "py.typed").exists()
print(f"sublaplace {sublaplace.__version__} works with torch {torch.__version__}.")
print(la.evaluate(held_out))
