"""The code in the documents runs as it stands there."""

import re
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

ROOT = Path(__file__).parent.parent


def blocks(document):
    return re.findall(r"```python\n(.*?)```", (ROOT / document).read_text(), flags=re.DOTALL)


@pytest.mark.parametrize("document", ["README.md", "DESIGN.md"])
def test_code_in_the_documents_runs(document):
    found = blocks(document)
    assert found
    data = TensorDataset(torch.randn(60, 4), torch.randint(0, 3, (60,)))
    names = {
        "model": nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 3)),
        "train_loader": DataLoader(data, batch_size=20),
    }
    with torch.random.fork_rng():
        for code in found:
            exec(code, names)


def test_the_pictures_of_the_readme_exist():
    for path in re.findall(r"!\[[^]]*\]\(([^)]+)\)", (ROOT / "README.md").read_text()):
        assert (ROOT / path).stat().st_size > 10_000
