"""Functions for corruptions of grey and of colour pictures: randomness, noise, motion blur, rounding to 8 bits.

A picture is (H, W) or (H, W, channels), with values in [0, 1].
"""

import hashlib

import numpy as np
from numpy.typing import NDArray

Picture = NDArray[np.float64]


def keyed_generator(key: str, image: NDArray[np.uint8]) -> np.random.Generator:
    """Return a generator keyed by a text and the image's pixels, so that a subset of images gives the same pictures."""
    digest = hashlib.blake2b(f"{key}/".encode() + image.tobytes(), digest_size=16).digest()
    return np.random.default_rng(int.from_bytes(digest, "little"))


def eight_bits(x: Picture) -> NDArray[np.uint8]:
    """Return ⌊255 x⌋, x clipped to [0, 1]."""
    # float32 first: 2.9999999999 is a three that rounding spoilt, and truncation would make it a two.
    return (np.clip(x, 0, 1) * 255).astype(np.float32).astype(np.uint8)


def poisson_noise(x: Picture, rng: np.random.Generator, photons: float) -> Picture:
    """Return Poisson(photons · x) / photons."""
    return rng.poisson(photons * x) / photons


def salt_and_pepper(x: Picture, rng: np.random.Generator, share: float) -> Picture:
    """Replace each value by 0 or 1, evenly, with probability `share`."""
    hit = rng.random(x.shape) < share
    salt = rng.random(x.shape) < 0.5
    return np.where(hit, salt, x)


def motion_blurred(x: Picture, radius: int, sigma: float, degrees: float) -> Picture:
    """Return Σ_i w_i x[r + ⌈i sin φ − ½⌉, c + ⌈i cos φ − ½⌉] over i = 0 … 2·radius.

    w_i ∝ exp(−i²/2σ²), and edges are repeated.
    """
    steps = np.arange(2 * radius + 1)
    weights = np.exp(-(steps**2) / (2 * sigma**2))
    weights /= weights.sum()
    down = np.ceil(steps * np.sin(np.deg2rad(degrees)) - 0.5).astype(int)
    right = np.ceil(steps * np.cos(np.deg2rad(degrees)) - 0.5).astype(int)
    height, width = x.shape[:2]
    rows, columns = np.indices((height, width))
    blurred = np.zeros_like(x)
    for weight, row_offset, column_offset in zip(weights, down, right, strict=True):
        inside_rows = np.clip(rows + row_offset, 0, height - 1)
        inside_columns = np.clip(columns + column_offset, 0, width - 1)
        blurred += weight * x[inside_rows, inside_columns]
    return blurred
