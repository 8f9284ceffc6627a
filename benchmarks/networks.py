"""The measured networks, their data, and a short training run whose weights are kept on disk.

The environment variable SUBLAPLACE_DATA names the folder that holds ``fashion_mnist/*.gz`` (IDX files), ``cifar10``
and ``cifar10_resnets``.
"""

from __future__ import annotations

import gzip
import os
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from experiments.calibration.cifar_resnet import CifarResNet  # noqa: E402
from experiments.resnets import ResNet18, freeze_norms  # noqa: E402

CACHE = HERE / ".cache"
EPOCHS = 40


def peers_cnn() -> nn.Sequential:
    """Three convolutions and one linear layer, plain modules that every peer knows: p = 21,706."""
    return nn.Sequential(
        *_block(nn.Conv2d(1, 32, 3, padding=1)),
        *_block(nn.Conv2d(32, 32, 3, padding=1)),
        *_block(nn.Conv2d(32, 32, 3, padding=1)),
        nn.Flatten(),
        nn.Linear(288, 10),
    )


class PaperCNN(nn.Module):
    """The paper's CNN, its second convolution applied twice with the same weights: p = 12,458."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(*_block(nn.Conv2d(1, 32, 3, padding=1)))
        self.reused = nn.Sequential(*_block(nn.Conv2d(32, 32, 3, padding=1)))
        self.head = nn.Linear(288, 10)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(self.reused(self.reused(self.first(inputs))).flatten(1))


class LoraLinear(nn.Module):
    """A frozen linear layer with a trained addition of rank r."""

    def __init__(self, fan_in: int, fan_out: int, rank: int = 8) -> None:
        super().__init__()
        self.frozen = nn.Linear(fan_in, fan_out).requires_grad_(False)
        self.down, self.up = nn.Linear(fan_in, rank, bias=False), nn.Linear(rank, fan_out, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        result: Tensor = self.frozen(hidden) + self.up(self.down(hidden))
        return result


class TransformerBlock(nn.Module):
    """Attention with four heads and two layers after it; with `lora`, queries and values alone are trained."""

    def __init__(self, width: int, lora: bool) -> None:
        super().__init__()
        linear = LoraLinear if lora else nn.Linear
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.query, self.value = linear(width, width), linear(width, width)
        self.key, self.out = nn.Linear(width, width), nn.Linear(width, width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        if lora:
            for module in (self.norms, self.key, self.out, self.wide, self.narrow):
                module.requires_grad_(False)

    def forward(self, hidden: Tensor) -> Tensor:
        x = self.norms[0](hidden)
        q, k, v = (layer(x).unflatten(2, (4, -1)).transpose(1, 2) for layer in (self.query, self.key, self.value))
        scores = torch.softmax(q @ k.mT / q.shape[-1] ** 0.5, dim=-1)
        hidden = hidden + self.out((scores @ v).transpose(1, 2).flatten(2))
        result: Tensor = hidden + self.narrow(nn.functional.gelu(self.wide(self.norms[1](hidden))))
        return result


class BertLike(nn.Module):
    """A frozen encoder of token sequences with LoRA of rank 8, and a trained head: 16,900 of 937,988."""

    def __init__(self, width: int = 128, depth: int = 4, num_outputs: int = 4) -> None:
        super().__init__()
        self.tokens = nn.Embedding(1000, width).requires_grad_(False)
        self.blocks = nn.Sequential(*[TransformerBlock(width, lora=True) for _ in range(depth)])
        self.head = nn.Linear(width, num_outputs)

    def forward(self, tokens: Tensor) -> Tensor:
        result: Tensor = self.head(self.blocks(self.tokens(tokens)).mean(1))
        return result


class VisionTransformer(nn.Module):
    """A small vision transformer for pictures of 32 × 32 pixels in 16 patches, all of it trained: p = 162,954."""

    def __init__(self, width: int = 64, depth: int = 3, num_outputs: int = 10) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 8, stride=8)
        self.blocks = nn.Sequential(*[TransformerBlock(width, lora=False) for _ in range(depth)])
        self.head = nn.Linear(width, num_outputs)

    def forward(self, images: Tensor) -> Tensor:
        result: Tensor = self.head(self.blocks(self.patches(images).flatten(2).transpose(1, 2)).mean(1))
        return result


def resnet20(num_outputs: int = 10) -> nn.Module:
    """ResNet20 for CIFAR10: p = 272,474 with 10 classes, 278,324 with 100."""
    return CifarResNet(num_outputs=num_outputs)


def _block(convolution: nn.Conv2d) -> tuple[nn.Module, ...]:
    return convolution, nn.ReLU(), nn.MaxPool2d(2)


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "peers-cnn": peers_cnn,
    "paper-cnn": PaperCNN,
    "resnet20": resnet20,
    "resnet20-100": lambda: resnet20(100),
    "bert-lora": BertLike,
    "resnet18": lambda: freeze_norms(ResNet18()),
}
PUBLISHED = {"resnet20": "cifar10_resnets/resnet20.safetensors"}
"""Trained weights that others published, below SUBLAPLACE_DATA."""


def build(name: str, weights: str) -> nn.Module:
    """The named network with its "random" or "trained" weights, the same on every call."""
    torch.manual_seed(0)
    network = NETWORKS[name]()
    if weights == "random":
        return network
    if name in PUBLISHED:
        network.load_state_dict(load_file(_data_folder() / PUBLISHED[name]))
        return network
    return trained(network, name)


def data_for(name: str, count: int) -> tuple[Tensor, Tensor]:
    """The first `count` training inputs and labels of the named network; tokens, and 100 labels, are drawn."""
    generator = torch.Generator().manual_seed(0)
    if name == "bert-lora":
        tokens = torch.randint(1, 1000, (count, 32), generator=generator)
        return tokens, torch.randint(4, (count,), generator=generator)
    if name == "resnet18":
        from experiments.colour_images import imagenet10

        dataset = imagenet10()
        return dataset.train_inputs[:count].clone(), dataset.train_targets[:count].clone()
    if name.startswith("resnet20"):
        inputs, labels = (tensor[:count].clone() for tensor in _few_cifar10())
        return inputs, torch.randint(100, (count,), generator=generator) if name == "resnet20-100" else labels
    inputs, labels = fashion_mnist("train")
    return inputs[:count].clone(), labels[:count].clone()


def _few_cifar10(count: int = 2000) -> tuple[Tensor, Tensor]:
    """The first training pictures of CIFAR10 in the scale of the published weights, kept on disk: unpacking is slow."""
    path = CACHE / f"cifar10-{count}.safetensors"
    if not path.exists():
        from experiments.calibration.cifar import MEAN, STD
        from experiments.colour_images import CIFAR10_MEAN, CIFAR10_STD, cifar10, pixels_of, scaled

        dataset = cifar10()
        images = scaled(pixels_of(dataset.train_inputs[:count], CIFAR10_MEAN, CIFAR10_STD), MEAN, STD)
        CACHE.mkdir(exist_ok=True)
        save_file({"images": images.contiguous(), "labels": dataset.train_targets[:count].contiguous()}, path)
    found = load_file(path)
    return found["images"], found["labels"]


def _data_folder() -> Path:
    if "SUBLAPLACE_DATA" not in os.environ:
        raise RuntimeError("set SUBLAPLACE_DATA to the folder that holds the data sets, see the top of networks.py")
    return Path(os.environ["SUBLAPLACE_DATA"])


def fashion_mnist(split: str) -> tuple[Tensor, Tensor]:
    """Inputs (n, 1, 28, 28) scaled to [-1, 1] and labels (n,) of the split "train" or "t10k"."""
    folder = _data_folder() / "fashion_mnist"
    pixels = _idx(folder / f"{split}-images-idx3-ubyte.gz", header=16).view(-1, 1, 28, 28)
    labels = _idx(folder / f"{split}-labels-idx1-ubyte.gz", header=8)
    return (pixels / 255 - 0.5) / 0.5, labels.long()


def _idx(path: Path, header: int) -> Tensor:
    return torch.frombuffer(bytearray(gzip.decompress(path.read_bytes())), dtype=torch.uint8)[header:]


def trained(network: nn.Module, name: str) -> nn.Module:
    """Load the weights of ``name`` into the network, after training them if they are not on disk yet."""
    path = CACHE / f"{name}-{EPOCHS}-epochs.safetensors"
    if not path.exists():
        _train(network, EPOCHS)
        CACHE.mkdir(exist_ok=True)
        save_file({key: value.detach() for key, value in network.named_parameters()}, path)
    weights = load_file(path)
    with torch.no_grad():
        for key, parameter in network.named_parameters():
            parameter.copy_(weights[key])
    return network


def _train(network: nn.Module, epochs: int, batch_size: int = 256) -> None:
    """The paper's recipe for FashionMNIST (Adam, L2, clipped gradients, linear warm-up and decay)."""
    torch.manual_seed(0)
    inputs, labels = fashion_mnist("train")
    optimizer = torch.optim.Adam(network.parameters(), lr=2e-3, weight_decay=1e-4)
    steps = epochs * -(-len(inputs) // batch_size)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, 1e-4 + step / (0.1 * steps), (steps - step) / (0.5 * steps))
    )
    for epoch in range(epochs):
        for batch in torch.randperm(len(inputs)).split(batch_size):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(network(inputs[batch]), labels[batch])
            loss.backward()
            nn.utils.clip_grad_norm_(network.parameters(), 1.0)
            optimizer.step()
            schedule.step()
        print(f"epoch {epoch + 1} of {epochs}, accuracy on the test set {accuracy(network):.3f}", flush=True)


@torch.no_grad()
def accuracy(network: nn.Module) -> float:
    inputs, labels = fashion_mnist("t10k")
    return (network(inputs).argmax(1) == labels).float().mean().item()


if __name__ == "__main__":
    for name in ("peers-cnn", "paper-cnn"):
        print(f"{name}: accuracy on the test set {accuracy(build(name, 'trained')):.3f}")
