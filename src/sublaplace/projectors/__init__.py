"""Projectors: the choice of the subspace."""
