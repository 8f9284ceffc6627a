"""Each corruption of MNIST-C has the property its settings state."""

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.stats import poisson

from experiments.corruptions import MNIST_C, corrupt, fog, glass_blur, motion_blurred, plasma

NOT_RANDOM = ("brightness", "canny_edges", "scale", "stripe")
MIDDLE = np.indices((28, 28)) - 13.5

# An 8 × 8 picture and what ImageMagick 6.9.11 (convert -motion-blur 3x1.5+30) made of it.
SHARP = [
    [207, 21, 45, 60, 46, 205, 222, 149],
    [10, 24, 85, 110, 159, 122, 67, 40],
    [177, 188, 8, 29, 115, 100, 227, 132],
    [107, 110, 170, 150, 44, 188, 193, 244],
    [201, 72, 81, 166, 166, 178, 222, 74],
    [240, 0, 19, 249, 241, 76, 35, 80],
    [11, 228, 169, 149, 62, 120, 48, 197],
    [121, 7, 65, 180, 133, 95, 64, 23],
]
BLURRED = [
    [115, 53, 75, 68, 103, 171, 154, 123],
    [17, 51, 100, 132, 157, 107, 75, 63],
    [177, 112, 33, 97, 130, 175, 196, 156],
    [108, 144, 161, 121, 125, 162, 181, 202],
    [128, 115, 137, 141, 142, 170, 139, 77],
    [140, 37, 110, 209, 146, 89, 87, 106],
    [105, 193, 150, 104, 79, 72, 92, 154],
    [77, 65, 117, 141, 100, 67, 40, 23],
]


def scribbles(count: int, seed: int = 0) -> NDArray[np.uint8]:
    """Pictures with random pixels in the middle and a black border, as digits have."""
    images = np.zeros((count, 28, 28), dtype=np.uint8)
    images[:, 6:22, 6:22] = np.random.default_rng(seed).integers(0, 256, (count, 16, 16))
    return images


def flat(value: int, count: int) -> NDArray[np.uint8]:
    """Pictures of one grey, all different in their lower right pixel: each gets a randomness of its own."""
    images = np.full((count, 28, 28), value, dtype=np.uint8)
    images[:, -1, -1] = np.arange(count)
    return images


def blob(angle: float) -> NDArray[np.uint8]:
    """An oval about the centre, twice as long as wide, its long axis turned by `angle`."""
    rows, columns = MIDDLE
    along, across = np.cos(angle) * columns + np.sin(angle) * rows, np.cos(angle) * rows - np.sin(angle) * columns
    return np.rint(255 * np.exp(-0.5 * ((along / 3) ** 2 + (across / 1.5) ** 2))).astype(np.uint8)


def second_moments(image: NDArray[np.uint8]) -> NDArray[np.float64]:
    """(2, 2) covariance of (column, row) under the picture's brightness, about the centre of the picture."""
    weights = image / image.sum()
    places = MIDDLE[::-1].reshape(2, -1)
    return (places * weights.ravel()) @ places.T


def test_there_are_fifteen() -> None:
    assert len(MNIST_C) == len(set(MNIST_C)) == 15


@pytest.mark.parametrize("name", MNIST_C)
def test_pictures_stay_pictures_and_repeat(name: str) -> None:
    images = scribbles(6)
    before = images.copy()
    result = corrupt(name, images, seed=3)
    assert result.shape == images.shape
    assert result.dtype == np.uint8
    assert (images == before).all()
    assert (result != images).any(axis=(1, 2)).all()
    assert (corrupt(name, images, seed=3) == result).all()


@pytest.mark.parametrize("name", MNIST_C)
def test_a_subset_in_another_order_gives_the_same_pictures(name: str) -> None:
    images = scribbles(6)
    chosen = [4, 1, 3]
    assert (corrupt(name, images[chosen], seed=3) == corrupt(name, images, seed=3)[chosen]).all()


@pytest.mark.parametrize("name", MNIST_C)
def test_another_seed_draws_anew_where_something_is_random(name: str) -> None:
    images = scribbles(12)
    differs = (corrupt(name, images, seed=1) != corrupt(name, images, seed=2)).any()
    assert differs == (name not in NOT_RANDOM)


def test_brightness_adds_one_half() -> None:
    images = scribbles(2)
    assert (corrupt("brightness", images, seed=0) == np.minimum(np.floor(images + 127.5), 255)).all()


def test_stripe_inverts_seven_columns_on_each_side_and_no_other() -> None:
    images = scribbles(2)
    result = corrupt("stripe", images, seed=0)
    outer = np.r_[0:7, 21:28]
    assert (result[:, :, outer] == 255 - images[:, :, outer]).all()
    assert (result[:, :, 7:21] == images[:, :, 7:21]).all()


def test_translate_shifts_by_three_pixels_in_all_four_directions() -> None:
    images = scribbles(40)
    seen = set()
    for image, result in zip(images, corrupt("translate", images, seed=0), strict=True):
        shifts = [(r, c) for r in (-3, 3) for c in (-3, 3) if (np.roll(image, (r, c), (0, 1)) == result).all()]
        assert len(shifts) == 1
        seen.update(shifts)
    assert len(seen) == 4


def test_translate_brings_in_black() -> None:
    result = corrupt("translate", np.full((1, 28, 28), 255, dtype=np.uint8), seed=0)
    assert (result == 255).sum() == 25**2
    assert (result == 0).sum() == 28**2 - 25**2


def test_impulse_noise_hits_seventeen_percent_half_of_them_white() -> None:
    images = flat(100, 60)
    result = corrupt("impulse_noise", images, seed=0)[:, :-1]
    pixels = result.size
    share = (result != 100).mean()
    assert set(np.unique(result)) == {0, 100, 255}
    assert abs(share - 0.17) < 5 * np.sqrt(0.17 * 0.83 / pixels)
    assert abs((result == 255).mean() / share - 0.5) < 5 * np.sqrt(0.25 / (0.17 * pixels))


def test_shot_noise_counts_three_photons_for_white() -> None:
    result = corrupt("shot_noise", flat(100, 60), seed=0)[:, :-1]
    assert set(np.unique(result)) == {0, 85, 170, 255}
    counts = np.arange(3)
    expected = [*poisson.pmf(counts, 300 / 255), poisson.sf(2, 300 / 255)]
    for value, probability in zip((0, 85, 170, 255), expected, strict=True):
        assert abs((result == value).mean() - probability) < 5 * np.sqrt(probability * (1 - probability) / result.size)


def test_motion_blur_is_that_of_imagemagick() -> None:
    blurred = motion_blurred(np.array(SHARP) / 255, radius=3, sigma=1.5, degrees=30) * 255
    assert (np.floor(blurred) == BLURRED).all()


def test_motion_blur_spreads_a_point_along_half_a_gaussian_at_angles_within_45_degrees() -> None:
    images = np.zeros((60, 28, 28), dtype=np.uint8)
    images[:, 14, 20] = np.arange(196, 256)  # every picture gets an angle of its own
    weights = np.exp(-(np.arange(21) ** 2) / (2 * 3.0**2))
    weights /= weights.sum()
    slopes = []
    for image, result in zip(images, corrupt("motion_blur", images, seed=0), strict=True):
        rows, columns = np.nonzero(result)
        steps = 20 - columns
        assert result[14, 20] == np.floor(weights[0] * image.max())
        assert steps.min() == 0
        assert (np.abs(rows - 14) <= steps).all()
        # Cut to 8 bits, each pixel loses less than one; the far end of the Gaussian is lost whole.
        assert 0 <= image.max() - result.sum() < len(rows) + np.sum(weights[weights * 255 < 1]) * 255
        slopes.append(np.sum((rows - 14) * steps) / np.sum(steps**2))
    assert min(slopes) < -0.8
    assert max(slopes) > 0.8


@pytest.mark.parametrize(
    ("name", "matrices"),
    [
        ("scale", [np.eye(2) / 0.7]),
        ("rotate", [np.array([[np.cos(a), -np.sin(a)], [np.sin(a), np.cos(a)]]) for a in (0.4, -0.4)]),
        ("shear", [np.array([[1, -np.sin(a)], [0, np.cos(a)]]) for a in (0.4, -0.4)]),
    ],
)
def test_geometry_maps_ovals_as_the_matrices_say(name: str, matrices: list[NDArray[np.float64]]) -> None:
    seen = set()
    for angle in np.linspace(0, np.pi, 12, endpoint=False):
        image = blob(angle)
        result = corrupt(name, image[None], seed=0)[0]
        moments = second_moments(result)
        inverses = [np.linalg.inv(matrix) for matrix in matrices]
        expected = [inverse @ second_moments(image) @ inverse.T for inverse in inverses]
        errors = [np.abs(moments - candidate).max() / np.trace(candidate) for candidate in expected]
        # Bilinear interpolation widens a picture by a fraction of a pixel.
        assert min(errors) < 0.04, errors
        seen.add(int(np.argmin(errors)))
    assert len(seen) == len(matrices)


class SwapsOnePixel:
    """A generator by which glass blur swaps pixel (14, 14) alone, in its first passes, with the one up and left."""

    def __init__(self, passes: int) -> None:
        self.passes = passes

    def random(self, shape: tuple[int, int]) -> NDArray[np.float64]:
        draws = np.ones(shape)
        if self.passes > 0:
            draws[14, 14] = 0
        self.passes -= 1
        return draws

    def integers(self, low: int, high: int, size: tuple[int, int, int]) -> NDArray[np.int64]:
        assert (low, high) == (-1, 1)
        return np.full(size, low)


@pytest.mark.parametrize("swaps", [0, 1])
def test_glass_blur_swaps_pixels_and_blurs_along_columns_only(swaps: int) -> None:
    image = np.zeros((28, 28))
    image[12:17, 14] = 1
    result = glass_blur(image, SwapsOnePixel(swaps))  # type: ignore[arg-type]
    moved = result[:, 13].sum() / result.sum()
    assert result[:, [*range(13), *range(15, 28)]].max() == 0
    assert moved == pytest.approx(0.2 * swaps, rel=0.05)
    if swaps:
        assert np.sum(result[:, 13] * np.arange(28)) / result[:, 13].sum() == pytest.approx(13, abs=0.05)


def test_glass_blur_blurs_twice_by_seven_tenths() -> None:
    image = np.zeros((28, 28))
    image[14, 14] = 1
    result = glass_blur(image, SwapsOnePixel(0))[:, 14]  # type: ignore[arg-type]
    # The first blur is cut to 8 bits.
    assert np.sum(result * (np.arange(28) - 14) ** 2) / result.sum() == pytest.approx(2 * 0.7**2, rel=0.05)


def test_glass_blur_shuffles_twice_and_keeps_the_light() -> None:
    images = scribbles(20)
    result = corrupt("glass_blur", images, seed=0)
    assert result.sum() == pytest.approx(images.sum(), rel=0.05)
    # A pixel of the scribble moves right by at most one column a pass, when its right neighbour changes places with it.
    assert (result[:, :, 23] > 0).any()
    assert not result[:, :, 24:].any()


def test_plasma_fills_the_unit_interval_and_roughness_falls_by_the_squared_decay() -> None:
    heights = plasma(256, 1.4, np.random.default_rng(0))
    assert heights.min() == 0
    assert heights.max() == 1

    def roughness(step: int) -> float:
        corners = heights[::step, ::step]
        around = (corners + np.roll(corners, -1, 0) + np.roll(corners, -1, 1) + np.roll(corners, (-1, -1), (0, 1))) / 4
        return float(np.std(heights[step // 2 :: step, step // 2 :: step] - around))

    assert roughness(4) / roughness(2) == pytest.approx(1.4**2, rel=0.05)
    assert roughness(8) / roughness(4) == pytest.approx(1.4**2, rel=0.1)


def test_fog_leaves_black_black_and_lifts_white_by_three_plasmas_over_four() -> None:
    assert not corrupt("fog", np.zeros((1, 28, 28), dtype=np.uint8), seed=0).any()
    white = corrupt("fog", np.full((1, 28, 28), 255, dtype=np.uint8), seed=0)
    assert white.min() >= 63  # (1 + 3·0)/4 of white
    picture = scribbles(1)[0] / 255
    clouds = plasma(256, 1.4, np.random.default_rng(5))[:28, :28]
    expected = (picture + 3 * clouds) * picture.max() / (picture.max() + 3)
    assert np.abs(fog(picture, np.random.default_rng(5)) - expected).max() < 1e-12


def test_spatter_lays_dark_drops_over_the_picture() -> None:
    black = corrupt("spatter", np.zeros((1, 28, 28), dtype=np.uint8), seed=0)
    drops = black[black > 0]
    assert 0 < drops.size < black.size / 2
    assert drops.min() >= np.floor(0.8 * 63)
    assert drops.max() <= 63
    white = corrupt("spatter", np.full((1, 28, 28), 255, dtype=np.uint8), seed=0)
    under = white[white < 255]
    assert under.size > 0
    assert under.max() <= 255 - 0.8 * (255 - 63)
    assert under.min() >= 63


def test_dotted_line_keeps_every_other_pair_of_columns_of_a_straight_line() -> None:
    image = np.zeros((1, 28, 28), dtype=np.uint8)
    line = corrupt("dotted_line", image, seed=1)[0] / 255
    kept = [column for column in range(27) if column % 4 in (2, 3)]
    assert sorted(set(np.nonzero(line)[1])) == kept
    centres = (line * np.arange(28)[:, None]).sum(0)[kept] / line.sum(0)[kept]
    slope, intercept = np.polyfit(kept, centres, 1)
    assert np.abs(intercept + slope * np.array(kept) - centres).max() < 0.3
    rows = np.arange(28)[:, None]
    first, last = np.rint(intercept), np.rint(intercept + 27 * slope)
    distance = np.abs(rows - (first + (last - first) / 27 * np.arange(28)))
    profile = np.clip(np.log(np.maximum(1 - distance / 2.3, 1e-12)) + 1, 0, 1)
    assert np.abs(line - profile)[:, kept].max() < 1 / 255 + 1e-9


def test_zigzag_swings_by_two_rows_about_a_line_between_columns_2_and_25() -> None:
    images = flat(0, 30)
    judged = 0
    for picture in corrupt("zigzag", images, seed=0):
        rows, columns = np.nonzero(picture[:27, :])
        if rows.min() < 1 or rows.max() > 25:
            continue  # it runs out of the picture
        judged += 1
        assert columns.min() >= 1
        assert columns.max() <= 26
        inside = np.arange(3, 24)
        centres = (picture * np.arange(28.0)[:, None]).sum(0)[inside] / picture.sum(0)[inside]
        swing = centres - np.polyval(np.polyfit(inside, centres, 1), inside)
        turns = np.sum(np.diff(np.sign(swing)) != 0)
        assert 4 <= turns <= 6  # zeros of a wave of period 8 over 20 columns
        assert 1.2 < np.abs(swing).max() < 2.7
    assert judged >= 5


def test_lines_are_added_to_what_is_there() -> None:
    images = scribbles(5)
    for name in ("dotted_line", "zigzag"):
        assert (corrupt(name, images, seed=0) >= images).all()


def test_canny_edges_are_white_lines_where_brightness_jumps() -> None:
    assert not corrupt("canny_edges", np.full((1, 28, 28), 128, dtype=np.uint8), seed=0).any()
    square = np.zeros((1, 28, 28), dtype=np.uint8)
    square[0, 8:20, 8:20] = 255
    edges = corrupt("canny_edges", square, seed=0)[0]
    assert set(np.unique(edges)) == {0, 255}
    rows, columns = np.nonzero(edges)
    to_border = np.abs(np.maximum(np.abs(rows - 13.5), np.abs(columns - 13.5)) - 6)
    assert to_border.max() <= 1
    assert not edges[11:17, 11:17].any()


def test_wrong_arguments_are_named() -> None:
    with pytest.raises(ValueError, match=r"unknown corruption 'snow'.*zigzag"):
        corrupt("snow", scribbles(1), seed=0)
    with pytest.raises(ValueError, match=r"uint8 of shape \(n, 28, 28\), not float64"):
        corrupt("fog", scribbles(1) / 255, seed=0)
    with pytest.raises(ValueError, match=r"not uint8 of shape \(28, 28\)"):
        corrupt("fog", scribbles(1)[0], seed=0)
