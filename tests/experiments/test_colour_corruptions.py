"""Each corruption of CIFAR-10-C has the property its settings state."""

import csv
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.stats import poisson
from skimage.color import hsv2rgb, rgb2hsv
from skimage.filters import gaussian

import experiments
from experiments.colour_corruptions import CIFAR10_C, SEVERITIES, corrupt
from experiments.pictures import motion_blurred

NOT_RANDOM = ("brightness", "gaussian_blur")
ROWS, COLUMNS = np.indices((32, 32))


def scribbles(count: int, seed: int = 0) -> NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, (count, 32, 32, 3), dtype=np.uint8)


def flat(value: int, count: int) -> NDArray[np.uint8]:
    """Pictures of one grey, all different in their lower right pixel: each gets a randomness of its own."""
    images = np.full((count, 32, 32, 3), value, dtype=np.uint8)
    images[:, -1, -1, 0] = np.arange(count)
    return images


def points(count: int) -> NDArray[np.uint8]:
    """One pixel in the middle of a black picture, in another brightness each, and the channels in proportion 4:2:1."""
    images = np.zeros((count, 32, 32, 3), dtype=np.uint8)
    images[:, 16, 16] = 4 * np.arange(64 - count, 64)[:, None] // np.array([1, 2, 4])
    return images


def ramps(count: int) -> NDArray[np.uint8]:
    """Red rises by 7 a row, green by 7 a column, so that the colour of a pixel tells where it was; blue tells apart."""
    images = np.empty((count, 32, 32, 3), dtype=np.uint8)
    images[..., 0], images[..., 1] = 16 + 7 * ROWS, 16 + 7 * COLUMNS
    images[..., 2] = np.arange(count)[:, None, None]
    return images


def displacements(severity: int, count: int) -> NDArray[np.float64]:
    """(n, 2, 32, 32): by how many rows and columns an elastic transform reads each pixel off its place."""
    pictures = np.concatenate(
        [corrupt("elastic_transform", severity, ramps(200), seed) for seed in range(count // 200)]
    )
    read = (pictures[..., :2] + 0.5 - 16) / 7  # cutting to bytes loses half a step
    return np.moveaxis(read, -1, 1) - np.stack([ROWS, COLUMNS])


def blur_kernel(sigma: float) -> NDArray[np.float64]:
    steps = np.arange(-np.rint(3 * sigma), np.rint(3 * sigma) + 1)
    weights = np.exp(-0.5 * (steps / sigma) ** 2)
    return weights / weights.sum()


def test_these_are_the_corruptions_of_the_published_table() -> None:
    with (Path(experiments.__file__).parent / "published" / "ood_extended.csv").open() as table:
        published = {row["dataset"] for row in csv.DictReader(table)}
    assert {f"cifar10-c/{name}" for name in CIFAR10_C} == published
    assert len(CIFAR10_C) == len(published)


@pytest.mark.parametrize("severity", SEVERITIES)
@pytest.mark.parametrize("name", CIFAR10_C)
def test_pictures_stay_pictures_and_repeat(name: str, severity: int) -> None:
    images = scribbles(4)
    before = images.copy()
    result = corrupt(name, severity, images, seed=3)
    assert result.shape == images.shape
    assert result.dtype == np.uint8
    assert (images == before).all()
    assert (result != images).any(axis=(1, 2, 3)).all()
    assert (corrupt(name, severity, images, seed=3) == result).all()


@pytest.mark.parametrize("name", CIFAR10_C)
def test_a_picture_does_not_depend_on_its_company(name: str) -> None:
    images, chosen = scribbles(6), [4, 1]
    assert (corrupt(name, 3, images[chosen], seed=3) == corrupt(name, 3, images, seed=3)[chosen]).all()


@pytest.mark.parametrize("name", CIFAR10_C)
def test_another_seed_draws_anew_where_something_is_random(name: str) -> None:
    images = scribbles(6)
    differs = (corrupt(name, 2, images, seed=1) != corrupt(name, 2, images, seed=2)).any()
    assert differs == (name not in NOT_RANDOM)


def test_each_severity_draws_anew() -> None:
    images = flat(100, 20)
    hits = [corrupt("impulse_noise", severity, images, seed=0)[:, :-1] != 100 for severity in (4, 5)]
    # The same draws would hit at severity 5 all that severity 4 hits.
    assert (hits[0] & hits[1]).sum() < 0.2 * hits[0].sum()


@pytest.mark.parametrize(("severity", "share"), [(1, 0.01), (2, 0.02), (3, 0.03), (4, 0.05), (5, 0.07)])
def test_impulse_noise_hits_values_of_single_channels_half_of_them_white(severity: int, share: float) -> None:
    result = corrupt("impulse_noise", severity, flat(100, 60), seed=0)[:, :-1]
    hit = result != 100
    assert set(np.unique(result)) == {0, 100, 255}
    assert abs(hit.mean() - share) < 5 * np.sqrt(share * (1 - share) / hit.size)
    assert abs((result[hit] == 255).mean() - 0.5) < 5 * np.sqrt(0.25 / hit.sum())
    all_three = hit.all(axis=-1).mean()
    assert all_three < share**3 + 5 * np.sqrt(share**3 / (hit.size / 3))


@pytest.mark.parametrize(("severity", "photons"), [(1, 500), (2, 250), (3, 100), (4, 75), (5, 50)])
def test_shot_noise_counts_photons(severity: int, photons: int) -> None:
    result = corrupt("shot_noise", severity, flat(51, 60), seed=0)[:, :-1]
    counts = np.arange(photons + 1)
    values = np.floor(np.float32(255 * counts / photons))
    probabilities = np.bincount(values.astype(int), poisson.pmf(counts, photons / 5), minlength=256)
    seen = np.bincount(result.ravel(), minlength=256) / result.size
    assert (np.abs(seen - probabilities) < 6 * np.sqrt(probabilities / result.size) + 1e-4).all()
    assert abs(np.corrcoef(result[..., 0].ravel(), result[..., 1].ravel())[0, 1]) < 0.03


@pytest.mark.parametrize(("severity", "deviation"), [(1, 0.06), (2, 0.1), (3, 0.12), (4, 0.16), (5, 0.2)])
def test_speckle_noise_grows_with_brightness(severity: int, deviation: float) -> None:
    for value in (40, 120):
        result = corrupt("speckle_noise", severity, flat(value, 40), seed=0)[:, :-1]
        assert result.mean() + 0.5 == pytest.approx(value, abs=0.5)  # cutting to bytes loses half a step
        assert result.std() == pytest.approx(np.hypot(deviation * value, 1 / np.sqrt(12)), rel=0.02)
        assert abs(np.corrcoef(result[..., 0].ravel(), result[..., 1].ravel())[0, 1]) < 0.03
    assert not corrupt("speckle_noise", severity, np.zeros((1, 32, 32, 3), dtype=np.uint8), seed=0).any()


@pytest.mark.parametrize(("severity", "sigma"), [(1, 0.4), (2, 0.6), (3, 0.7), (4, 0.8), (5, 1)])
def test_gaussian_blur_spreads_each_channel_by_sigma(severity: int, sigma: float) -> None:
    images = scribbles(3)
    result = corrupt("gaussian_blur", severity, images, seed=0)
    expected = np.stack([gaussian(image / 255, sigma=sigma, channel_axis=-1) for image in images]) * 255
    assert (result <= expected + 1e-3).all()
    assert (result > expected - 1 - 1e-3).all()


@pytest.mark.parametrize(("severity", "lift"), [(1, 0.05), (2, 0.1), (3, 0.15), (4, 0.2), (5, 0.3)])
def test_brightness_lifts_the_value_of_hsv(severity: int, lift: float) -> None:
    images = scribbles(3)
    images[0, :2] = 0
    colours = rgb2hsv(images)
    colours[..., 2] = np.minimum(colours[..., 2] + lift, 1)
    expected = hsv2rgb(colours) * 255
    result = corrupt("brightness", severity, images, seed=0)
    assert (result <= expected + 1e-3).all()
    assert (result > expected - 1 - 1e-3).all()
    assert (result[0, :2] == np.floor(np.float32(255 * lift))).all()


@pytest.mark.parametrize(
    ("severity", "radius", "sigma"), [(1, 6, 1.0), (2, 6, 1.5), (3, 6, 2.0), (4, 8, 2.0), (5, 9, 2.5)]
)
def test_motion_blur_spreads_a_point_along_half_a_gaussian(severity: int, radius: int, sigma: float) -> None:
    images = points(50)
    weights = np.exp(-(np.arange(2 * radius + 1) ** 2) / (2 * sigma**2))
    weights /= weights.sum()
    slopes = []
    for image, result in zip(images, corrupt("motion_blur", severity, images, seed=0), strict=True):
        for channel in range(3):
            light = image[16, 16, channel]
            rows, columns = np.nonzero(result[..., channel])
            assert result[16, 16, channel] == np.floor(weights[0] * light)
            assert (columns <= 16).all()
            assert (np.abs(rows - 16) <= 16 - columns).all()
            assert 0 <= light - result[..., channel].sum() <= len(rows) + np.sum(weights[weights * light < 1]) * light
        # All channels are blurred along the same line: where blue is left, so is red, at least four times as bright.
        assert (result[..., 0] >= 4 * result[..., 2].astype(int)).all()
        rows, columns = np.nonzero(result[..., 0])
        steps = 16 - columns
        slopes.append(np.sum((rows - 16) * steps) / np.sum(steps**2))
    assert -1 <= min(slopes) < -0.8
    assert 0.8 < max(slopes) <= 1


def test_motion_blur_of_a_colour_picture_is_that_of_its_channels() -> None:
    picture = scribbles(1)[0] / 255
    blurred = motion_blurred(picture, radius=6, sigma=1.5, degrees=-20)
    for channel in range(3):
        assert (blurred[..., channel] == motion_blurred(picture[..., channel], 6, 1.5, -20)).all()


# Severity: reach and σ of the displacements, shift of the affine map, in parts of the side of 32 pixels.
ELASTIC = {2: (0.05, 0.2, 0.07), 3: (0.08, 0.06, 0.06), 4: (0.1, 0.04, 0.05), 5: (0.1, 0.03, 0.03)}


def test_elastic_transform_of_severity_one_is_affine_and_moves_three_corners_by_up_to_eight_percent() -> None:
    everywhere = np.c_[ROWS.ravel(), COLUMNS.ravel(), np.ones(32 * 32)]
    middle = (np.abs(everywhere[:, :2] - 15.5) < 6).all(axis=1)
    corners = np.array([[26, 26], [6, 26], [6, 6]])  # (row, column)
    shifts = []
    for displaced in displacements(1, 400):
        read = everywhere[:, :2] + displaced.reshape(2, -1).T
        backwards = np.linalg.lstsq(everywhere[middle], read[middle], rcond=None)[0]
        # Beyond the edges the picture goes on as in a mirror that stands on its outermost pixels.
        inside = 31 - np.abs(31 - np.abs(everywhere @ backwards))
        assert np.abs(inside - read).max() < 2 / 7
        shifts.append((corners - backwards[2]) @ np.linalg.inv(backwards[:2]) - corners)
    sizes = np.abs(shifts)
    assert sizes.max() < 0.08 * 32 + 0.1
    assert (sizes.max(axis=0) > 0.95 * 0.08 * 32).all()
    assert (np.abs(sizes.mean(axis=0) - 0.04 * 32) < 0.1 * 0.04 * 32).all()


@pytest.mark.parametrize("severity", [2, *(pytest.param(each, marks=pytest.mark.slow) for each in (3, 4)), 5])
def test_elastic_transform_displaces_the_middle_by_the_affine_map_and_by_blurred_noise(severity: int) -> None:
    """Var = shift²/6 (the middle lies halfway between two of the three corners) + reach²/3 · (Σ k²)², k the blur."""
    reach, sigma, shift = (32 * setting for setting in ELASTIC[severity])
    expected = shift**2 / 6 + reach**2 / 3 * np.sum(blur_kernel(sigma) ** 2) ** 2
    middle = displacements(severity, 1000)[:, :, 16, 16]
    assert np.mean(middle**2) == pytest.approx(expected, rel=0.12)
    assert abs(np.mean(middle[:, 0] * middle[:, 1])) < 0.12 * expected


@pytest.mark.parametrize("severity", [3, 4, 5])
def test_elastic_transform_bends_as_blurred_noise_does(severity: int) -> None:
    """The second differences d[c − 1] − 2 d[c] + d[c + 1] do not see the affine map; those of severity 2 are tiny."""
    reach, sigma, _ = (32 * setting for setting in ELASTIC[severity])
    kernel = blur_kernel(sigma)
    expected = reach**2 / 3 * np.sum(kernel**2) * np.sum(np.convolve(kernel, [1, -2, 1]) ** 2)
    rounding = 6 * (1 / 7) ** 2 / 12  # bytes: 1² + 2² + 1² times the variance of a step
    bends = np.diff(displacements(severity, 200)[:, :, 8:24, 8:24], n=2, axis=-1)
    assert np.mean(bends**2) == pytest.approx(expected + rounding, rel=0.03)


@pytest.mark.parametrize("severity", SEVERITIES)
def test_elastic_transform_moves_all_channels_alike_and_brings_in_no_black(severity: int) -> None:
    images = scribbles(5)
    images[..., 1] = images[..., 2] = images[..., 0]
    result = corrupt("elastic_transform", severity, images, seed=0)
    assert (result == result[..., :1]).all()
    assert (corrupt("elastic_transform", severity, np.full_like(images, 200), seed=0) == 200).all()


def test_wrong_arguments_are_named() -> None:
    with pytest.raises(ValueError, match=r"unknown corruption 'snow'.*speckle_noise"):
        corrupt("snow", 1, scribbles(1), seed=0)
    for severity in (0, 6):
        with pytest.raises(ValueError, match=f"1, 2, 3, 4, 5, not {severity}"):
            corrupt("brightness", severity, scribbles(1), seed=0)
    with pytest.raises(ValueError, match=r"uint8 of shape \(n, 32, 32, 3\), not float64"):
        corrupt("brightness", 1, scribbles(1) / 255, seed=0)
    with pytest.raises(ValueError, match=r"not uint8 of shape \(32, 32, 3\)"):
        corrupt("brightness", 1, scribbles(1)[0], seed=0)
