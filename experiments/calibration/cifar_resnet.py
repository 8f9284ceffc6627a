"""The residual networks for CIFAR10 of He et al. (2016), section 4.2, with the names of the published weights."""

from torch import Tensor, nn

from experiments.resnets import BasicBlock


class CifarResNet(nn.Module):
    """A network of 6n + 2 layers for pictures of 32 × 32 pixels: p = 272,474 with n = 3 blocks per stage."""

    def __init__(self, blocks: int = 3, num_outputs: int = 10) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 16, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(16)
        self.relu = nn.ReLU()
        self.layer1 = self._stage(16, 16, blocks, stride=1)
        self.layer2 = self._stage(16, 32, blocks, stride=2)
        self.layer3 = self._stage(32, 64, blocks, stride=2)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(64, num_outputs)

    @staticmethod
    def _stage(inputs: int, outputs: int, blocks: int, stride: int) -> nn.Sequential:
        others = [BasicBlock(outputs, outputs, 1) for _ in range(blocks - 1)]
        return nn.Sequential(BasicBlock(inputs, outputs, stride), *others)

    def forward(self, images: Tensor) -> Tensor:
        hidden = self.relu(self.bn1(self.conv1(images)))
        hidden = self.layer3(self.layer2(self.layer1(hidden)))
        result: Tensor = self.fc(self.avgpool(hidden).flatten(1))
        return result
