"""Warnings that point at the user's own line."""

import sys
import warnings


def warn(message: str) -> None:
    """Warn as of the first caller outside of the package, so that the message shows the user's call."""
    level, frame = 2, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("sublaplace"):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)
