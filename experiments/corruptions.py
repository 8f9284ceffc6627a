"""The fifteen corruptions of MNIST-C (Mu and Gilmer 2019), at one fixed severity each.

The published arrays were drawn without a seed, so they cannot be reproduced bit for bit; settings and quirks are the
same. Each corruption is a function of one picture in [0, 1] and a random generator.
"""

from collections.abc import Callable
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray
from scipy.ndimage import gaussian_filter, gaussian_filter1d
from skimage.feature import canny
from skimage.transform import warp

from experiments.pictures import Picture, eight_bits, keyed_generator, motion_blurred, poisson_noise, salt_and_pepper

Corruption = Callable[[Picture, np.random.Generator], Picture]

SIDE = 28
CENTRE = (SIDE - 1) / 2


def corrupt(name: str, images: NDArray[np.uint8], seed: int) -> NDArray[np.uint8]:
    """Return the images (n, 28, 28) under one corruption of `MNIST_C`.

    Each image depends on name, seed and its own pixels alone.
    """
    if name not in _CORRUPTIONS:
        raise ValueError(f"unknown corruption {name!r}; MNIST-C has {', '.join(MNIST_C)}")
    if images.dtype != np.uint8 or images.ndim != 3 or images.shape[1:] != (SIDE, SIDE):
        raise ValueError(
            f"images must be uint8 of shape (n, {SIDE}, {SIDE}), not {images.dtype} of shape {images.shape}; "
            "pass the pixels as read, before any scaling"
        )
    corrupted = np.empty_like(images)
    for index, image in enumerate(images):
        picture = _CORRUPTIONS[name](image / 255, keyed_generator(f"{name}/{seed}", image))
        corrupted[index] = eight_bits(picture)
    return corrupted


# --- noise ------------------------------------------------------------------------------------------------------------


def shot_noise(x: Picture, rng: np.random.Generator) -> Picture:
    """Return Poisson(3x) / 3."""
    return poisson_noise(x, rng, photons=3)


def impulse_noise(x: Picture, rng: np.random.Generator) -> Picture:
    """Replace each pixel by black or white, evenly, with probability 0.17."""
    return salt_and_pepper(x, rng, share=0.17)


# --- blur -------------------------------------------------------------------------------------------------------------


def glass_blur(x: Picture, rng: np.random.Generator) -> Picture:
    """Blur, swap every other pixel with a neighbour above or to the left in two passes, and blur again.

    The blur runs along columns only: MNIST-C's call took the last axis for colour channels.
    """
    pixels = (_vertical_blur(x) * 255).astype(np.uint8).tolist()
    for _ in range(2):
        swapped = rng.random((SIDE, SIDE)) < 0.5
        offsets = rng.integers(-1, 1, size=(2, SIDE, SIDE))
        for row in range(SIDE - 1, 1, -1):
            for column in np.flatnonzero(swapped[row, 2:])[::-1] + 2:
                up, left = row + offsets[0, row, column], column + offsets[1, row, column]
                pixels[row][column], pixels[up][left] = pixels[up][left], pixels[row][column]
    return _vertical_blur(np.array(pixels) / 255)


def _vertical_blur(x: Picture) -> Picture:
    return gaussian_filter1d(x, sigma=0.7, axis=0, mode="nearest", truncate=4)


def motion_blur(x: Picture, rng: np.random.Generator) -> Picture:
    """Blur with half a Gaussian (radius 10, σ 3) along a line at a random angle within ±45°, as ImageMagick does."""
    return motion_blurred(x, radius=10, sigma=3.0, degrees=rng.uniform(-45, 45))


# --- geometry: matrices map (column, row) of the result to the original ----------------------------------------------


def shear(x: Picture, rng: np.random.Generator) -> Picture:
    """Shear by ±0.4 about the centre, (c, r) ← (c − r sin φ, r cos φ).

    That is what scikit-image meant by `shear` when MNIST-C was made; its present releases use tan φ and keep heights.
    """
    angle = 0.4 * _sign(rng)
    return _warp_about_centre(x, np.array([[1, -np.sin(angle)], [0, np.cos(angle)]]))


def scale(x: Picture, rng: np.random.Generator) -> Picture:
    """Shrink the digit to 0.7 of its size about the centre; nothing is random."""
    return _warp_about_centre(x, np.eye(2) / 0.7)


def rotate(x: Picture, rng: np.random.Generator) -> Picture:
    """Rotate by ±0.4 rad about the centre."""
    angle = 0.4 * _sign(rng)
    return _warp_about_centre(x, np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]]))


def translate(x: Picture, rng: np.random.Generator) -> Picture:
    """Shift by ±3 pixels along each axis; black comes in."""
    rows, columns = 3 * _sign(rng), 3 * _sign(rng)
    padded = np.pad(x, 3)
    return padded[3 + rows : 3 + rows + SIDE, 3 + columns : 3 + columns + SIDE]


def _sign(rng: np.random.Generator) -> int:
    return 1 if rng.random() < 0.5 else -1


def _warp_about_centre(x: Picture, matrix: NDArray[np.float64]) -> Picture:
    """Return x(A(v − centre) + centre) for each pixel v, read bilinearly, black outside."""
    centre = np.full(2, CENTRE)
    inverse_map = np.eye(3)
    inverse_map[:2, :2] = matrix
    inverse_map[:2, 2] = centre - matrix @ centre
    return warp(x, inverse_map, order=1, mode="constant", cval=0.0)


# --- light, weather, overlays -----------------------------------------------------------------------------------------


def brightness(x: Picture, rng: np.random.Generator) -> Picture:
    """Return x + 0.5, clipped; nothing is random."""
    return x + 0.5


def stripe(x: Picture, rng: np.random.Generator) -> Picture:
    """Invert columns 0 to 6 and 21 to 27; nothing is random."""
    striped = x.copy()
    for columns in (slice(0, 7), slice(21, 28)):
        striped[:, columns] = 1 - x[:, columns]
    return striped


def fog(x: Picture, rng: np.random.Generator) -> Picture:
    """Return (x + 3 plasma) · max / (max + 3).

    max is the brightest pixel of x, and plasma the upper left of a 256 × 256 map.
    """
    brightest = x.max()
    return (x + 3 * plasma(256, 1.4, rng)[:SIDE, :SIDE]) * brightest / (brightest + 3)


def plasma(size: int, decay: float, rng: np.random.Generator) -> Picture:
    """Return diamond-square noise on a torus, scaled to [0, 1]; `size` is a power of two. Cost: O(size²).

    Amplitudes begin at 100² and fall by decay² per level: MNIST-C multiplies its noise of width w by w once more.
    """
    heights = np.zeros((size, size))
    step, width = size, 100.0

    def displaced(sum_of_four: Picture) -> Picture:
        return sum_of_four / 4 + width * rng.uniform(-width, width, sum_of_four.shape)

    while step >= 2:
        half = step // 2
        corners = heights[::step, ::step]
        top = corners + np.roll(corners, -1, axis=1)
        middles = displaced(top + np.roll(top, -1, axis=0))
        heights[half::step, half::step] = middles
        heights[::step, half::step] = displaced(top + middles + np.roll(middles, 1, axis=0))
        left = corners + np.roll(corners, -1, axis=0)
        heights[half::step, ::step] = displaced(left + middles + np.roll(middles, 1, axis=1))
        step, width = half, width / decay
    heights -= heights.min()
    return heights / heights.max()


def spatter(x: Picture, rng: np.random.Generator) -> Picture:
    """Return x (1 − m) + 63/255 m with a mask m of drops.

    The mask is noise, blurred, cut at 0.65, blurred again, and set to 0 below 0.8.
    """
    liquid = gaussian_filter(rng.normal(0.65, 0.3, x.shape), sigma=1, mode="nearest", truncate=4)
    mask = gaussian_filter((liquid > 0.65).astype(float), sigma=1.5, mode="nearest", truncate=4)
    mask[mask < 0.8] = 0
    return x * (1 - mask) + 63 / 255 * mask


def dotted_line(x: Picture, rng: np.random.Generator) -> Picture:
    """Add a line from the left to the right edge, of which every other two columns are kept."""
    first_row, last_row = rng.integers(0, 27, size=2)
    line = _line((0, first_row), (SIDE - 1, last_row))
    kept = np.arange(SIDE) // 2 % 2 == 1
    return x + line * kept


def zigzag(x: Picture, rng: np.random.Generator) -> Picture:
    """Add a zigzag of amplitude 2 along a line from column 2 to 25 whose rows differ by −5 to 4."""
    first_column, last_column, reach = 2, 25, 2.0
    first_row = rng.integers(0, 27)
    rise = rng.integers(-5, 5)
    angle = np.arctan(rise / (last_column - first_column))
    length = (last_column - first_column) / np.cos(angle)
    along = np.arange(reach, length, 2 * reach)
    across = reach * (-1.0) ** np.arange(len(along))
    # The last stroke ends where MNIST-C ends it, near the line itself.
    end = across[-1] / (2 * (length % (2 * reach))) if length % (2 * reach) else 0.0
    along, across = np.r_[0, along, length], np.r_[0, across, end]
    columns = first_column + np.cos(angle) * along - np.sin(angle) * across
    rows = first_row + np.sin(angle) * along + np.cos(angle) * across
    points = list(zip(columns, rows, strict=True))
    drawn = x
    for start, stop in pairwise(points):
        drawn = np.clip(drawn + _line(start, stop), 0, 1)
    return drawn


def _line(start: tuple[float, float], stop: tuple[float, float]) -> Picture:
    """Return clip(ln(1 − d/2.3) + 1, 0, 1) between two (column, row); d is the vertical distance to their line."""
    (start_column, start_row), (stop_column, stop_row) = start, stop
    rows, columns = np.indices((SIDE, SIDE))
    line_rows = start_row + (stop_row - start_row) / (stop_column - start_column) * (columns - start_column)
    distance = np.minimum(np.abs(rows - line_rows), 2.3 - 1e-10)
    profile = np.clip(np.log(1 - distance / 2.3) + 1, 0, 1)
    return profile * ((columns >= np.floor(start_column)) & (columns < np.ceil(stop_column)))


def canny_edges(x: Picture, rng: np.random.Generator) -> Picture:
    """Return Canny's edges in white on black; nothing is random."""
    return canny(x).astype(float)


_CORRUPTIONS: dict[str, Corruption] = {
    "brightness": brightness,
    "canny_edges": canny_edges,
    "dotted_line": dotted_line,
    "fog": fog,
    "glass_blur": glass_blur,
    "impulse_noise": impulse_noise,
    "motion_blur": motion_blur,
    "rotate": rotate,
    "scale": scale,
    "shear": shear,
    "shot_noise": shot_noise,
    "spatter": spatter,
    "stripe": stripe,
    "translate": translate,
    "zigzag": zigzag,
}
MNIST_C: tuple[str, ...] = tuple(_CORRUPTIONS)
