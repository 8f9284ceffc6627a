"""A fit on several processes: ``torchrun --nproc-per-node 2 examples/several_processes.py``.

Every process is given the same loader and reads its share of the batches; all of them end with the same posterior. The
same script runs on GPUs, with one process per GPU. Without torchrun it runs in one process.
"""

import os

import torch
import torch.nn.functional as F
from torch import distributed as group
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from sublaplace import SubspaceLaplace


def trained_network(inputs: torch.Tensor, labels: torch.Tensor) -> nn.Module:
    """Return a small classifier, which is the same on all processes because they share the seed."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 3))
    optimizer = torch.optim.Adam(model.parameters(), 0.01, weight_decay=1e-3)
    for _ in range(100):
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
    return model


def main() -> None:
    several = "RANK" in os.environ  # set by torchrun
    device = torch.device("cpu")
    if several:
        group.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
        if torch.cuda.is_available():
            device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
            torch.cuda.set_device(device)
    inputs = torch.randn(4000, 8, generator=torch.Generator().manual_seed(0))
    labels = inputs[:, :3].argmax(1)
    model = trained_network(inputs, labels).to(device)

    la = SubspaceLaplace.paper(model, "classification", dim=50)
    la.fit(DataLoader(TensorDataset(inputs, labels), batch_size=100))  # the same on every process; no sampler

    rank = group.get_rank() if several else 0
    probabilities = la(inputs[:2])
    print(f"rank {rank}: λ = {la.prior_precision}, probabilities of two inputs {probabilities.flatten().tolist()}")
    if several:
        group.destroy_process_group()


if __name__ == "__main__":
    main()
