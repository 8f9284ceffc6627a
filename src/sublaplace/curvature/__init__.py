"""The GGN in exact, Kronecker-factored, diagonal and matrix-free form."""
