"""Factored Jacobians of trained networks."""
