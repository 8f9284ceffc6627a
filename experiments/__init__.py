"""The paper's experiments, repeated with the library; run at the repository's root as ``python -m experiments``."""
