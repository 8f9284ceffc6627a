"""Count what products with a Jacobian cost by its rows and by forward-mode differentiation.

Counts decide which way is taken, never measured times, so that a fit gives the same numbers every time.
"""

from sublaplace.jacobians.plan import Plan

_PER_ELEMENT = 50
"""Multiplications that take the time of one entry of a tangent in activations, pooling and copies (measured)."""


def cost_by_rows(plan: Plan, num_parameters: int, rows: int, count: int) -> int:
    """Return the multiplications per input of `rows` backward passes and the product of their rows with vectors.

    With F multiplications in a forward pass and A entries of activations, the passes take K·F. The product takes the
    cheaper of s·(F + K·A), which contracts the vectors with the factors, and K·(F + p·s), which forms rows first.

    Args:
        plan: the measured size of the network.
        num_parameters: p.
        rows: K.
        count: s, the number of vectors.
    """
    forward, elements = plan.multiplications, plan.gradient_elements
    products = min(count * (forward + rows * elements), rows * (forward + num_parameters * count))
    return rows * forward + products


def cost_forward(plan: Plan, count: int) -> int:
    """Return the multiplications per input of `count` Jacobian–vector products: 2·F each, and the activations."""
    return count * (2 * plan.multiplications + _PER_ELEMENT * plan.gradient_elements)
