"""Small dense linear algebra, always in float64, and the orthonormal basis of a large p × s matrix."""

import torch
from torch import Tensor

from sublaplace.parameters import Vectors


def cholesky(matrix: Tensor, what: str) -> Tensor:
    """The lower Cholesky factor of a positive definite float64 matrix, with an error that says what failed.

    Cost: s³/3.
    """
    factor, info = torch.linalg.cholesky_ex(matrix)
    if int(info):
        raise ValueError(
            f"{what} is not positive definite (leading minor {int(info)} of {len(matrix)}). "
            "A larger prior precision or a float64 model helps."
        )
    return factor


def dominant_eigenvectors(matrix: Tensor, count: int, tolerance: float) -> tuple[Tensor, Tensor]:
    """The eigenvalues, descending, and eigenvectors of a positive semi-definite matrix: at most `count` of them.

    Only those above the numerical rank are given: eigenvalue > tolerance · largest eigenvalue. Cost: O(size³).
    """
    values, vectors = torch.linalg.eigh(matrix)
    values, vectors = values.flip(0), vectors.flip(1)
    rank = int((values > tolerance * values[0].clamp_min(0)).sum())
    keep = min(count, rank)
    return values[:keep], vectors[:, :keep]


def symmetric_product(factor: Tensor) -> Tensor:
    """F Fᵀ of factors (…, r, m): (…, r, r), without forming both triangles. Cost: about r²·m/2 where r is large."""
    size = factor.shape[-2]
    if size <= _SMALLEST_STRIP:
        return factor @ factor.mT
    result = factor.new_empty(*factor.shape[:-1], size)
    step = max(_SMALLEST_STRIP, -(-size // 8))
    for start in range(0, size, step):
        strip = factor[..., start:, :] @ factor[..., start : start + step, :].mT
        result[..., start:, start : start + step] = strip
        result[..., start : start + step, start:] = strip.mT
    return result


_SMALLEST_STRIP = 96  # rows; narrower products run below the processor's rate


def gram(vectors: Vectors) -> Tensor:
    """V Vᵀ of vectors (r, p) held by parameter: (r, r) in float64. Cost: p·r²/2."""
    count = len(next(iter(vectors.values())))
    total = torch.zeros((), dtype=torch.float64)
    for part in vectors.values():
        # Products of float32 parts are exact enough only when summed in float64: convert piece by piece.
        for piece in part.split(_columns_of_piece(count), dim=1):
            total = symmetric_product(piece.double()) + total.to(piece.device)
    return total


def _columns_of_piece(rows: int) -> int:
    """How many columns to convert to float64 at a time: 16 MiB of them."""
    return max(1, 2**21 // rows)


def orthonormalised(vectors: Vectors) -> Vectors:
    """An orthonormal basis (rows) whose every leading part spans what the leading vectors span.

    Cholesky QR, three times: L Lᵀ = V Vᵀ, V ← L⁻¹ V, where the first factorisation is shifted a little so that it
    cannot break down. Works on vectors held by parameter, in place of a copying QR of a p × s matrix. Vectors are
    scaled to length one first. Cost: 3·p·s² and no second p × s matrix.
    """
    basis = dict(vectors)
    lengths = gram_diagonal(basis).sqrt()
    scale = torch.where(lengths > 0, 1 / lengths, 1.0)
    basis = {name: _applied(torch.diag(scale), part) for name, part in basis.items()}
    for shift in (len(scale) * torch.finfo(torch.float64).eps, 0.0, 0.0):
        products = gram(basis)
        products.diagonal().add_(shift)
        factor = cholesky(products, "The Gram matrix of the projection")
        inverse = torch.linalg.solve_triangular(factor, torch.eye(len(factor)).to(factor), upper=False)
        for name, part in basis.items():
            basis[name] = _applied(inverse, part)
    return basis


def gram_diagonal(vectors: Vectors) -> Tensor:
    """The squared lengths of vectors held by parameter: (r,) in float64."""
    return torch.stack([part.double().square().sum(1) for part in vectors.values()]).sum(0)


def _applied(matrix: Tensor, part: Tensor) -> Tensor:
    """matrix @ part in float64, stored in the part's dtype, a piece at a time."""
    result = torch.empty_like(part)
    width = _columns_of_piece(len(part))
    for start in range(0, part.shape[1], width):
        columns = slice(start, start + width)
        result[:, columns] = (matrix @ part[:, columns].double()).to(part.dtype)
    return result
