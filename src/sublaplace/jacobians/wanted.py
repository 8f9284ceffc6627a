"""What will be asked of a Jacobian, so that nothing else is computed."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Wanted:
    """What will be asked of a Jacobian. The rest can still be asked for, but costs extra passes.

    Args:
        products: the number of vectors that the Jacobian is multiplied by, if nothing else is asked of it. None: its
            rows are needed.
    """

    products: int | None = None


ROWS = Wanted()
"""All rows with respect to all parameters."""
