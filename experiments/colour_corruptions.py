"""The seven corruptions of CIFAR-10-C (Hendrycks and Dietterich 2019) that the paper uses, at five severities.

The published arrays were drawn without a seed, so they cannot be reproduced bit for bit; the settings are the same.
Each corruption is a function of one picture (32, 32, 3) in [0, 1], a random generator and a setting per severity.
"""

from collections.abc import Callable
from functools import partial

import numpy as np
from numpy.typing import NDArray
from scipy.ndimage import affine_transform, gaussian_filter, map_coordinates

from experiments.pictures import Picture, eight_bits, keyed_generator, motion_blurred, poisson_noise, salt_and_pepper

Corruption = Callable[[Picture, np.random.Generator], Picture]

SIDE = 32
SEVERITIES = range(1, 6)


def corrupt(name: str, severity: int, images: NDArray[np.uint8], seed: int) -> NDArray[np.uint8]:
    """Return the images (n, 32, 32, 3) under one corruption of `CIFAR10_C`.

    Each image depends on name, severity, seed and its own pixels alone.
    """
    if name not in _CORRUPTIONS:
        raise ValueError(f"unknown corruption {name!r}; of CIFAR-10-C there are {', '.join(CIFAR10_C)}")
    if severity not in SEVERITIES:
        raise ValueError(f"severity must be one of {', '.join(map(str, SEVERITIES))}, not {severity!r}")
    if images.dtype != np.uint8 or images.ndim != 4 or images.shape[1:] != (SIDE, SIDE, 3):
        raise ValueError(
            f"images must be uint8 of shape (n, {SIDE}, {SIDE}, 3), not {images.dtype} of shape {images.shape}; "
            "pass the pixels as read, before any scaling"
        )
    corruption = _CORRUPTIONS[name][SEVERITIES.index(severity)]
    corrupted = np.empty_like(images)
    for index, image in enumerate(images):
        picture = corruption(image / 255, keyed_generator(f"{name}/{severity}/{seed}", image))
        corrupted[index] = eight_bits(picture)
    return corrupted


def speckle_noise(x: Picture, rng: np.random.Generator, deviation: float) -> Picture:
    """Return x + x ε, with ε ~ N(0, deviation²) for each value."""
    return x + x * rng.normal(0, deviation, x.shape)


def gaussian_blur(x: Picture, rng: np.random.Generator, sigma: float) -> Picture:
    """Blur along rows and columns of each channel; nothing is random."""
    return gaussian_filter(x, sigma=(sigma, sigma, 0), mode="nearest", truncate=4)


def motion_blur(x: Picture, rng: np.random.Generator, radius: int, sigma: float) -> Picture:
    """Blur with half a Gaussian along a line at a random angle within ±45°, as ImageMagick does."""
    return motion_blurred(x, radius, sigma, degrees=rng.uniform(-45, 45))


def brightness(x: Picture, rng: np.random.Generator, lift: float) -> Picture:
    """Raise the value of HSV, v = max of the channels, to min(v + lift, 1): x · raised / v; nothing is random.

    Hue and saturation stay. Black, which has neither, becomes grey.
    """
    value = x.max(axis=-1, keepdims=True)
    raised = np.minimum(value + lift, 1)
    black = value == 0
    return np.where(black, raised, x * raised / np.where(black, 1, value))


def elastic_transform(x: Picture, rng: np.random.Generator, reach: float, sigma: float, shift: float) -> Picture:
    """Apply a random affine map, then displacements; both read the picture bilinearly and reflect it at its edges.

    The affine map takes three corners of a square to places up to `shift` pixels off along each axis. The displacements
    are reach · (uniform noise in [−1, 1], blurred by σ) along each axis. CIFAR-10-C rounds the places from which its
    affine map reads to 1/32 of a pixel; here they are exact.
    """
    corners = SIDE // 2 + SIDE // 3 * np.array([[1, 1], [1, -1], [-1, -1]])  # (column, row)
    moved = corners + rng.uniform(-shift, shift, corners.shape)
    # A (row, column, 1) of the result ↦ (row, column) of the picture: B with B · moved = corners.
    backwards = np.linalg.solve(np.c_[moved[:, ::-1], np.ones(3)], corners[:, ::-1]).T
    displacements = [
        reach * gaussian_filter(rng.uniform(-1, 1, x.shape[:2]), sigma, mode="reflect", truncate=3) for _ in range(2)
    ]
    places = np.indices(x.shape[:2]) + np.stack(displacements)
    channels = []
    for channel in np.moveaxis(x, -1, 0):
        mapped = affine_transform(channel, backwards, order=1, mode="mirror")
        channels.append(map_coordinates(mapped, places, order=1, mode="reflect"))
    return np.stack(channels, axis=-1)


_CORRUPTIONS: dict[str, tuple[Corruption, ...]] = {
    "brightness": tuple(partial(brightness, lift=lift) for lift in (0.05, 0.1, 0.15, 0.2, 0.3)),
    "elastic_transform": tuple(
        partial(elastic_transform, reach=SIDE * reach, sigma=SIDE * sigma, shift=SIDE * shift)
        for reach, sigma, shift in (
            (0, 0, 0.08),
            (0.05, 0.2, 0.07),
            (0.08, 0.06, 0.06),
            (0.1, 0.04, 0.05),
            (0.1, 0.03, 0.03),
        )
    ),
    "gaussian_blur": tuple(partial(gaussian_blur, sigma=sigma) for sigma in (0.4, 0.6, 0.7, 0.8, 1)),
    "impulse_noise": tuple(partial(salt_and_pepper, share=share) for share in (0.01, 0.02, 0.03, 0.05, 0.07)),
    "motion_blur": tuple(
        partial(motion_blur, radius=radius, sigma=sigma)
        for radius, sigma in ((6, 1), (6, 1.5), (6, 2), (8, 2), (9, 2.5))
    ),
    "shot_noise": tuple(partial(poisson_noise, photons=photons) for photons in (500, 250, 100, 75, 50)),
    "speckle_noise": tuple(partial(speckle_noise, deviation=deviation) for deviation in (0.06, 0.1, 0.12, 0.16, 0.2)),
}
CIFAR10_C: tuple[str, ...] = tuple(_CORRUPTIONS)
