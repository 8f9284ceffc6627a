"""The changes of training pictures, against one picture at a time and against what was asked for on average."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from experiments import augmentation
from experiments.augmentation import cifar10, crop_boxes, enlarged, greyscale
from experiments.colour_images import CIFAR10_MEAN, CIFAR10_STD


def pictures(count: int) -> torch.Tensor:
    return torch.randn(count, 3, 32, 32, generator=torch.Generator().manual_seed(0))


def test_a_crop_is_that_part_of_the_picture_resized() -> None:
    images = pictures(3)
    boxes = np.array([[0, 0, 32, 32], [5, 9, 17, 20], [20, 3, 12, 15]])
    found = enlarged(images, boxes)
    torch.testing.assert_close(found[0], images[0], atol=1e-5, rtol=0)
    for image, (top, left, height, width), result in zip(images, boxes.tolist(), found, strict=True):
        part = image[None, :, top : top + height, left : left + width]
        resized = F.interpolate(part, (32, 32), mode="bilinear", align_corners=False)[0]
        torch.testing.assert_close(result, resized, atol=1e-4, rtol=0)


def test_crops_fit_and_have_the_area_and_ratio_asked_for() -> None:
    top, left, height, width = crop_boxes(4000, 32, 32, np.random.default_rng(0)).T
    assert (top >= 0).all() and (left >= 0).all() and (top + height <= 32).all() and (left + width <= 32).all()
    areas, ratios = height * width / 32**2, width / height
    assert areas.min() > 0.17 and areas.max() == 1.0
    assert ratios.min() > 0.7 and ratios.max() < 1.43
    # Large areas fit at few ratios only, so that a second draw makes the mean a little less than 0.6.
    assert 0.5 < areas.mean() < 0.6
    assert abs(np.log(ratios).mean()) < 0.01
    assert top.max() > 15 and left.max() > 15


def test_grey_pictures_keep_their_luma() -> None:
    images = pictures(2)
    mean, std = (torch.tensor(values)[:, None, None] for values in (CIFAR10_MEAN, CIFAR10_STD))
    grey = greyscale(images, CIFAR10_MEAN, CIFAR10_STD) * std + mean
    torch.testing.assert_close(grey[:, 0], grey[:, 1])
    torch.testing.assert_close(grey[:, 0], grey[:, 2])
    pixels = images * std + mean
    torch.testing.assert_close(grey[:, 0], 0.2989 * pixels[:, 0] + 0.587 * pixels[:, 1] + 0.114 * pixels[:, 2])


def test_the_same_generator_gives_the_same_pictures() -> None:
    images = pictures(8)
    first, again, other = (cifar10(images, np.random.default_rng(seed)) for seed in (1, 1, 2))
    assert torch.equal(first, again) and not torch.equal(first, other)
    assert images.shape == first.shape and first.isfinite().all()


@pytest.mark.parametrize("what", ["FLIPPED", "GREY", "CROPPED"])
def test_each_change_has_its_probability(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    probability = getattr(augmentation, what)
    for name in ("FLIPPED", "GREY", "CROPPED"):
        monkeypatch.setattr(augmentation, name, probability if name == what else 0.0)
    images = pictures(1).expand(2000, -1, -1, -1)
    changed = (cifar10(images, np.random.default_rng(0)) - images).flatten(1).abs().amax(1) > 1e-3
    assert changed.double().mean().item() == pytest.approx(probability, abs=0.04)


def test_nothing_is_changed_without_probability(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FLIPPED", "GREY", "CROPPED"):
        monkeypatch.setattr(augmentation, name, 0.0)
    images = pictures(4)
    torch.testing.assert_close(cifar10(images, np.random.default_rng(0)), images, atol=1e-5, rtol=0)
