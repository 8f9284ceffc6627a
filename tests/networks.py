"""Small random networks of every kind that the library must handle, each with a batch of inputs."""

from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn


class PaperCNN(nn.Module):
    """The paper's CNN in small: its second convolution block is applied twice with the same weights."""

    def __init__(self, width: int = 4, outputs: int = 3) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, width, 3, padding=1)
        self.block = nn.Conv2d(width, width, 3, padding=1)
        self.head = nn.Linear(width, outputs)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.first(x)), 2)
        for _ in range(2):
            x = F.max_pool2d(F.relu(self.block(x)), 2)
        return self.head(x.flatten(1))


class ResidualNet(nn.Module):
    """Batch norm with running statistics, in-place activations and additions."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(2, 4, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(4)
        self.conv = nn.Conv2d(4, 4, 3, padding=1)
        self.norm2 = nn.BatchNorm2d(4)
        self.head = nn.Linear(4, 3)
        for norm in (self.norm, self.norm2):
            norm.running_mean.normal_(0, 0.3)
            norm.running_var.uniform_(0.5, 2)
            nn.init.normal_(norm.weight, 1, 0.2)
            nn.init.normal_(norm.bias, 0, 0.2)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.stem(x)), inplace=True)
        y = self.norm2(self.conv(x))
        y += x
        return self.head(F.relu(y, inplace=True).mean((2, 3)))


class EmbeddingNet(nn.Module):
    """Token and position embeddings (the latter without a batch dimension), padding, mean pooling."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(7, 4, padding_idx=0)
        self.positions = nn.Embedding(5, 4)
        self.head = nn.Linear(4, 3)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        return self.head(x.tanh().mean(1))


class TiedWeights(nn.Module):
    """One matrix as embedding and as output layer, another as two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(4, 5)
        self.mix = nn.Linear(5, 5)
        self.again = nn.Linear(5, 5)
        self.again.weight = self.mix.weight
        self.head = nn.Linear(5, 4, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.mix(self.embedding(ids).mean(1)).tanh()
        return self.head(self.again(x).tanh())


class FreeParameters(nn.Module):
    """Parameters outside any module: scale, shift, a matrix in `@`, a sliced and a transposed one."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(4))
        self.shift = nn.Parameter(torch.randn(1, 4))
        self.matrix = nn.Parameter(torch.randn(4, 3))
        self.sliced = nn.Parameter(torch.randn(5, 3))
        self.back = nn.Parameter(torch.randn(2, 3))
        self.unused = nn.Parameter(torch.randn(3))

    def forward(self, x: Tensor) -> Tensor:
        h = ((x * self.scale + self.shift).tanh() @ self.matrix) * self.sliced[:1]
        return h.tanh() @ self.back.t()


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase] = nn.LSTM) -> None:
        super().__init__()
        self.cell = kind(3, 4, batch_first=True)
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.cell(x)[0][:, -1])


class Attention(nn.Module):
    """Self-attention, which works with the positions in front of the batch inside."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(x + self.attention(x, x, x)[0]).mean(1))


class Flattening(nn.Module):
    """Merges the batch with the positions before a linear layer, in both possible orders."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 4)
        self.outer = nn.Linear(4, 4)
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        n, t, d = x.shape
        h = self.inner(x.reshape(n * t, d)).tanh().view(n, t, 4)
        h = self.outer(h.transpose(0, 1).reshape(t * n, 4)).tanh().view(t, n, 4)
        return self.head(h.mean(0))


class TwoInputs(nn.Module):
    """Takes keywords, as Hugging Face models do, and returns an object with logits."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Linear(3, 4)
        self.right = nn.Linear(2, 4)
        self.head = nn.Linear(4, 2)

    def forward(self, left: Tensor, right: Tensor) -> "Logits":
        return Logits(self.head((self.left(left) + self.right(right)).tanh()))


class InfiniteSlope(nn.Module):
    """Finite outputs with derivatives that are NaN: √ of negative numbers, masked afterwards."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(3, 4)
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        h = self.inner(x)
        return self.head(torch.where(h > 0, h.sqrt(), torch.zeros_like(h)))


class Logits:
    def __init__(self, logits: Tensor) -> None:
        self.logits = logits


def mlp(inputs: int = 3, outputs: int = 2) -> nn.Module:
    return nn.Sequential(nn.Linear(inputs, 6), nn.Tanh(), nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, outputs))


def frozen_layer() -> nn.Module:
    model = mlp()
    model[2].weight.requires_grad_(False)
    model[0].requires_grad_(False)
    return model


def convolutions() -> nn.Module:
    """Stride, padding, dilation, groups, depthwise."""
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, stride=2, padding=1),
        nn.GroupNorm(2, 4),
        nn.ReLU(inplace=True),
        nn.Conv2d(4, 4, 3, padding=2, dilation=2, groups=2),
        nn.Tanh(),
        nn.Conv2d(4, 4, 3, padding="same", groups=4, bias=False),
        nn.Flatten(),
        nn.Linear(64, 3),
    )


def convolution_1d() -> nn.Module:
    return nn.Sequential(nn.Conv1d(2, 3, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(21, 2))


def convolution_3d() -> nn.Module:
    return nn.Sequential(nn.Conv3d(1, 2, 2), nn.Tanh(), nn.Flatten(), nn.Linear(16, 2))


def norms() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Tanh(), nn.RMSNorm(6), nn.Linear(6, 2))


def transformer() -> nn.Module:
    layer = nn.TransformerEncoderLayer(4, 2, 6, batch_first=True)
    return nn.Sequential(nn.TransformerEncoder(layer, 1, enable_nested_tensor=False), nn.Flatten(), nn.Linear(12, 2))


def _randn(*shape: int) -> Callable[[int], Tensor]:
    return lambda n: torch.randn(n, *shape)


def _tokens(vocabulary: int, length: int) -> Callable[[int], Tensor]:
    return lambda n: torch.randint(0, vocabulary, (n, length))


NETWORKS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], object]]] = {
    "mlp": (mlp, _randn(3)),
    "paper-cnn": (PaperCNN, _randn(1, 8, 8)),
    "residual-batch-norm": (ResidualNet, _randn(2, 5, 5)),
    "layer-norm": (norms, _randn(4)),
    "conv-groups": (convolutions, _randn(2, 8, 8)),
    "conv1d": (convolution_1d, _randn(2, 7)),
    "conv3d": (convolution_3d, _randn(1, 3, 3, 3)),
    "embedding": (EmbeddingNet, _tokens(7, 5)),
    "attention": (Attention, _randn(3, 4)),
    "transformer": (transformer, _randn(3, 4)),
    "tied-weights": (TiedWeights, _tokens(4, 3)),
    "frozen-layer": (frozen_layer, _randn(3)),
    "free-parameters": (FreeParameters, _randn(4)),
    "flattening": (Flattening, _randn(4, 3)),
    "keyword-inputs": (TwoInputs, lambda n: {"left": torch.randn(n, 3), "right": torch.randn(n, 2)}),
    "lstm": (Recurrent, _randn(4, 3)),
    "gru": (lambda: Recurrent(nn.GRU), _randn(4, 3)),
}


BOTH = {"mlp", "paper-cnn", "transformer", "embedding"}


def pairs(values: Sequence[object], names: Callable[[object], str] = str) -> list[object]:
    """Every network with each of two values: by turns, one of the two is slow; those in `BOTH` have two quick ones."""
    return [
        pytest.param(
            network,
            value,
            id=f"{network}-{names(value)}",
            marks=() if network in BOTH or turn % 2 == place else pytest.mark.slow,
        )
        for turn, network in enumerate(NETWORKS)
        for place, value in enumerate(values)
    ]


def make(name: str, n: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> tuple[nn.Module, object]:
    """The network and n inputs, reproducibly."""
    build, inputs = NETWORKS[name]
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model, batch = build().to(dtype), inputs(n)
    return model, cast(batch, dtype)


def cast(batch: object, dtype: torch.dtype) -> object:
    if isinstance(batch, dict):
        return {key: cast(value, dtype) for key, value in batch.items()}
    assert isinstance(batch, Tensor)
    return batch.to(dtype) if batch.is_floating_point() else batch
