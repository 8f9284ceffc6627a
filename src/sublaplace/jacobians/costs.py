"""Count what products with a Jacobian cost by its rows and by forward-mode differentiation.

Counts decide which way is taken, never measured times, so that a fit gives the same numbers every time.
"""

from sublaplace.jacobians.plan import Sizes
from sublaplace.jacobians.wanted import Wanted

_PER_ELEMENT = 50
"""Multiplications that take the time of one entry of a tangent in activations, pooling and copies (measured)."""


def cost_by_rows(sizes: Sizes, num_parameters: int, rows: int, wanted: Wanted) -> int:
    """Return the multiplications per input of `rows` backward passes and the product of their rows with vectors.

    With B multiplications in a backward pass, F in the wanted calls and A entries of gradients, the passes take K·B.
    The product takes the cheaper of s·(F + K·A), which contracts the vectors with the factors, and K·(F + p·s), which
    forms rows first.

    Args:
        sizes: the size of the network.
        num_parameters: p, of the wanted parameters.
        rows: K.
        wanted: the number s of vectors; with a product of the transpose, the second factor counts twice.
    """
    count = wanted.products or 0
    products = min(count * (sizes.forward + rows * sizes.gradients), rows * (sizes.forward + num_parameters * count))
    return rows * sizes.backward + (2 if wanted.transposed else 1) * products


def cost_of_formed_rows(sizes: Sizes, num_parameters: int, rows: int, vectors: int) -> int:
    """Return the multiplications per input of K rows of p numbers, their products with vectors and with each other.

    That is K·(B + F + p·r) and K²·p/2.

    Args:
        sizes: the size of the network.
        num_parameters: p, of the parameters whose rows are formed.
        rows: K.
        vectors: r.
    """
    return rows * (sizes.backward + sizes.forward + num_parameters * vectors) + rows**2 * num_parameters // 2


def cost_forward(sizes: Sizes, wanted: Wanted) -> int:
    """Return the multiplications per input of s Jacobian–vector products: 2·F each, and the activations.

    Products of the transpose are ordinary backward passes and take as much again.
    """
    ways = 2 if wanted.transposed else 1
    return ways * (wanted.products or 0) * (2 * sizes.forward + _PER_ELEMENT * sizes.activations)


def cost_by_features(body: Sizes, num_parameters: int, features: int, outputs: int, wanted: Wanted) -> int:
    """Return the multiplications per input of F backward passes, the product of their rows, and W times the result.

    Args:
        body: the size of the network before its last layer.
        num_parameters: the number of wanted parameters before the last layer.
        features: F.
        outputs: C; the last layer's part and W take C·F each per vector.
        wanted: as in `cost_by_rows`.
    """
    ways = 2 if wanted.transposed else 1
    return cost_by_rows(body, num_parameters, features, wanted) + 2 * ways * (wanted.products or 0) * features * outputs
