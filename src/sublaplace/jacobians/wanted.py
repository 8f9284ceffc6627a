"""What will be asked of a Jacobian, so that nothing else is computed."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Wanted:
    """What will be asked of a Jacobian.

    Args:
        products: the number of vectors that the Jacobian is multiplied by, if nothing else is asked of it. None: its
            rows are needed.
        transposed: whether its transpose is multiplied by as many vectors as well, summed over the inputs.
        names: the parameters that count; all others have no rows. None: all count.
        features: whether rows of many outputs may come from those of fewer features (see `features.py`).
    """

    products: int | None = None
    transposed: bool = False
    names: frozenset[str] | None = None
    features: bool = False

    def includes(self, names: tuple[str, ...]) -> bool:
        """Return whether any of these parameters is wanted."""
        return self.names is None or not self.names.isdisjoint(names)


ROWS = Wanted()
"""All rows with respect to all parameters."""
