"""Random changes of training pictures, drawn again for every batch."""

from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from experiments.colour_images import CIFAR10_MEAN, CIFAR10_STD

FLIPPED, GREY, CROPPED = 0.5, 0.3, 0.5  # probabilities
SCALES = (0.2, 1.0)  # the area of a crop, as a share of the picture
RATIOS = (3 / 4, 4 / 3)  # its width over its height
LUMA = (0.2989, 0.587, 0.114)  # of red, green and blue
CROP_ATTEMPTS = 10


def cifar10(images: Tensor, generator: np.random.Generator) -> Tensor:
    """Return scaled images (n, 3, H, W), some flipped, made grey or cropped and enlarged, as the probabilities say."""
    n, _, height, width = images.shape
    flipped, grey, cropped = (_chosen(n, probability, generator) for probability in (FLIPPED, GREY, CROPPED))
    whole = np.tile([0, 0, height, width], (n, 1))
    boxes = np.where(cropped.numpy()[:, None], crop_boxes(n, height, width, generator), whole)
    images = torch.where(flipped[:, None, None, None], images.flip(3), images)
    images = torch.where(grey[:, None, None, None], greyscale(images, CIFAR10_MEAN, CIFAR10_STD), images)
    return enlarged(images, boxes)


AUGMENTATIONS: dict[str, Callable[[Tensor, np.random.Generator], Tensor]] = {"cifar10": cifar10}


def _chosen(count: int, probability: float, generator: np.random.Generator) -> Tensor:
    return torch.from_numpy(generator.random(count) < probability)


def greyscale(images: Tensor, mean: tuple[float, ...], std: tuple[float, ...]) -> Tensor:
    """Set all three channels to 0.2989 red + 0.587 green + 0.114 blue, for images scaled with `mean` and `std`."""
    means, deviations, luma = (torch.tensor(values)[:, None, None] for values in (mean, std, LUMA))
    grey = ((images * deviations + means) * luma).sum(1, keepdim=True)
    return (grey - means) / deviations


def crop_boxes(count: int, height: int, width: int, generator: np.random.Generator) -> NDArray[np.int64]:
    """Draw top, left, height and width of random crops: (count, 4).

    The area and the logarithm of the ratio are uniform. The first of `CROP_ATTEMPTS` draws that fits is used. If none
    fits, the crop is the whole picture.
    """
    shape = (CROP_ATTEMPTS, count)
    areas = height * width * generator.uniform(*SCALES, shape)
    ratios = np.exp(generator.uniform(np.log(RATIOS[0]), np.log(RATIOS[1]), shape))
    heights, widths = np.rint(np.sqrt(areas / ratios)).astype(int), np.rint(np.sqrt(areas * ratios)).astype(int)
    fits = (heights > 0) & (heights <= height) & (widths > 0) & (widths <= width)
    first, columns = fits.argmax(0), np.arange(count)
    any_fits = fits.any(0)
    h = np.where(any_fits, heights[first, columns], height)
    w = np.where(any_fits, widths[first, columns], width)
    return np.stack([generator.integers(0, height - h + 1), generator.integers(0, width - w + 1), h, w], axis=1)


def enlarged(images: Tensor, boxes: NDArray[np.int64]) -> Tensor:
    """Enlarge the box (top, left, height, width) of each image (n, 3, H, W) to the image's size, bilinearly."""
    _, _, height, width = images.shape
    top, left, box_height, box_width = torch.from_numpy(boxes).to(images.dtype).T
    rows = _sampled(top, box_height, height)[:, :, None].expand(-1, -1, width)
    columns = _sampled(left, box_width, width)[:, None, :].expand(-1, height, -1)
    # grid_sample counts places from −1 to 1, the outer edges of the picture.
    grid = torch.stack([(2 * columns + 1) / width - 1, (2 * rows + 1) / height - 1], dim=3)
    return F.grid_sample(images, grid, mode="bilinear", padding_mode="border", align_corners=False)


def _sampled(start: Tensor, length: Tensor, size: int) -> Tensor:
    """Return where each of `size` pixels reads in a stretch of the original: (n, size). Nothing beyond it is read."""
    places = start[:, None] + (torch.arange(size) + 0.5) * length[:, None] / size - 0.5
    return places.clamp(start[:, None], (start + length - 1)[:, None])
