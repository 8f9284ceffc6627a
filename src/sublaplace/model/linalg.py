"""Small dense linear algebra, always in float64, and operations on a few vectors in parameter space."""

import torch
from torch import Tensor

Vectors = dict[str, Tensor]
"""A few vectors in parameter space: for every parameter a (count, size) matrix with one row per vector.

Vectors are stored by parameter, so that each layer works on contiguous memory and nothing has to be concatenated.
"""


def cholesky(matrix: Tensor, what: str) -> Tensor:
    """Return the lower Cholesky factor of a positive definite float64 matrix.

    Cost: s³/3.

    Args:
        matrix: (s, s).
        what: the subject of the error message, such as "The posterior precision".

    Raises:
        ValueError: if the matrix is not positive definite.
    """
    factor, info = torch.linalg.cholesky_ex(matrix)
    if int(info):
        raise ValueError(
            f"{what} is not positive definite (leading minor {int(info)} of {len(matrix)}). "
            "Use a larger prior precision or a float64 model."
        )
    return factor


def dominant_eigenvectors(matrix: Tensor, count: int, tolerance: float) -> tuple[Tensor, Tensor]:
    """Return at most `count` leading eigenvalues, descending, and eigenvectors of a positive semi-definite matrix.

    Only eigenvalues within the numerical rank are returned: eigenvalue > tolerance · largest eigenvalue.
    Cost: O(size³).
    """
    values, vectors = torch.linalg.eigh(matrix)
    values, vectors = values.flip(0), vectors.flip(1)
    rank = int((values > tolerance * values[0].clamp_min(0)).sum())
    keep = min(count, rank)
    return values[:keep], vectors[:, :keep]


def symmetric_product(factor: Tensor) -> Tensor:
    """Return F Fᵀ for factors F (…, r, m): (…, r, r). Only one triangle is computed. Cost: about r²·m/2 for large r."""
    size = factor.shape[-2]
    if size <= _SMALLEST_STRIP:
        return factor @ factor.mT
    result = factor.new_empty(*factor.shape[:-1], size)
    for start, stop in _strips(size):
        result[..., start:, start:stop] = factor[..., start:, :] @ factor[..., start:stop, :].mT
    return mirrored(result)


_SMALLEST_STRIP = 96  # rows; narrower products do not reach the processor's peak rate


def _strips(size: int) -> list[tuple[int, int]]:
    step = max(_SMALLEST_STRIP, -(-size // 8))
    return [(start, min(start + step, size)) for start in range(0, size, step)]


def mirrored(matrix: Tensor) -> Tensor:
    """Copy the lower triangle of matrices (…, r, r) to the upper triangle, in place."""
    for start, stop in _strips(matrix.shape[-1]):
        square = matrix[..., start:stop, start:stop]
        square.copy_(square.tril() + square.tril(-1).mT)
        matrix[..., start:stop, stop:] = matrix[..., stop:, start:stop].mT
    return matrix


def gram(vectors: Vectors, factor: Tensor | None = None) -> Tensor:
    """Return V Vᵀ for vectors V (r, p): (r, r) in float64. With a triangular factor L, use L⁻¹V in place of V.

    Cost: p·r²/2, or p·r² with a factor.
    """
    count = len(next(iter(vectors.values())))
    total = torch.zeros(count, count, dtype=torch.float64, device="cpu")
    for part in vectors.values():
        total = total.to(part.device)
        # Sums of float32 products are accurate enough only in float64. Converting piece by piece saves memory.
        for piece in part.split(_columns_of_piece(count), dim=1):
            exact = piece.double()
            if factor is not None:
                exact = torch.linalg.solve_triangular(factor, exact, upper=False)
            for start, stop in _strips(count):
                total[start:, start:stop].addmm_(exact[start:], exact[start:stop].T)
    return mirrored(total)


def _columns_of_piece(rows: int) -> int:
    """Return how many columns to convert to float64 at a time: 16 MiB, or more if r × r matrices are large."""
    return max(2**21 // rows, rows // 2, 1)


def cross_gram(vectors: Vectors, others: Vectors) -> Tensor:
    """Return V Wᵀ for vectors V (r, p) and W (q, p): (r, q) in float64. Cost: p·r·q."""
    total = torch.zeros((), dtype=torch.float64, device="cpu")
    for name, part in vectors.items():
        width = _columns_of_piece(len(part))
        for piece, other in zip(part.split(width, dim=1), others[name].split(width, dim=1), strict=True):
            total = piece.double() @ other.double().T + total.to(piece.device)
    return total


def orthonormalise(vectors: Vectors) -> Vectors:
    """Orthonormalise the vectors (rows) in place; the span of the first k vectors stays the same for every k.

    The method is Cholesky QR, at most three rounds: L Lᵀ = V Vᵀ, V ← L⁻¹ V. The vectors are scaled to length one
    first. A small shift of the first factorisation prevents its breakdown. The rounds end once the vectors are
    orthonormal up to rounding, usually after one round in float32 and two in float64.

    Cost: 1.5·p·s² to 3·p·s² multiplications; no second p × s matrix.
    """
    lengths = gram_diagonal(vectors).sqrt()
    scale = torch.where(lengths > 0, 1 / lengths, 1.0)
    for part in vectors.values():
        part.mul_(scale.to(part)[:, None])
    rounding = len(scale) * torch.finfo(torch.float64).eps
    tolerance = max(rounding, 4 * torch.finfo(next(iter(vectors.values())).dtype).eps)
    for shift in (rounding, 0.0, 0.0):
        products = gram(vectors)
        products.diagonal().sub_(1)
        deviation = products.abs().max()
        if deviation <= tolerance:
            break
        products.diagonal().add_(1 + shift)
        _solve(cholesky(products, "The Gram matrix of the projection"), vectors)
        if deviation < 0.01:
            break  # one round orthonormalises well-conditioned vectors up to rounding
    return vectors


def _solve(factor: Tensor, vectors: Vectors) -> None:
    """Replace V by L⁻¹ V for a lower triangular L (r, r), in place. Cost: p·r²/2."""
    for part in vectors.values():
        for piece in part.split(_columns_of_piece(len(part)), dim=1):
            piece.copy_(torch.linalg.solve_triangular(factor, piece.double(), upper=False))


def gram_diagonal(vectors: Vectors) -> Tensor:
    """Return the squared lengths of the vectors: (r,) in float64."""
    total = torch.zeros((), dtype=torch.float64, device="cpu")
    for part in vectors.values():
        for piece in part.split(_columns_of_piece(len(part)), dim=1):
            total = piece.double().square().sum(1) + total.to(piece.device)
    return total


def combine(matrix: Tensor, vectors: Vectors) -> Vectors:
    """Replace V by matrix V for a matrix (q, r) with q ≤ r, in place, and return views of the first q rows.

    Products are in float64, a few columns at a time. Cost: p·q·r.
    """
    count = len(matrix)
    for part in vectors.values():
        for piece in part.split(_columns_of_piece(len(part)), dim=1):
            piece[:count] = (matrix @ piece.double()).to(piece.dtype)
    return {name: part[:count] for name, part in vectors.items()}


_BEYOND_CACHES = 2**27  # bytes


def add_product(into: Tensor, weights: Tensor, rows: Tensor) -> None:
    """Add W X to `into` (r, m), for weights W (r, q) and rows X (q, m). Cost: r·q·m.

    A plain product works on all r rows at once. If `into` is far larger than the caches, these are too many streams for
    the hardware prefetcher. The product is then split into blocks of rows, or into blocks of columns for large q.
    """
    if into.nbytes <= _BEYOND_CACHES or into.device.type != "cpu":
        into.addmm_(weights, rows)
    elif len(rows) <= 32:
        for some, their_weights in zip(into.split(16), weights.split(16), strict=True):
            some.addmm_(their_weights, rows)
    else:
        for some, columns in zip(into.split(4096, dim=1), rows.split(4096, dim=1), strict=True):
            some += weights @ columns


def filled_up(parts: list[Tensor]) -> Tensor:
    """Concatenate tensors (n, K, …), with zeros behind those of a smaller K than others: (Σ n, max K, …)."""
    most = max(part.shape[1] for part in parts)
    if all(part.shape[1] == most for part in parts):
        return torch.cat(parts)
    whole = [part.new_zeros(len(part), most, *part.shape[2:]) for part in parts]
    for into, part in zip(whole, parts, strict=True):
        into[:, : part.shape[1]] = part
    return torch.cat(whole)


def diagonal_blocks(joint: Tensor, count: int) -> Tensor:
    """Return the diagonal blocks (n, C, C) of a joint covariance (nC, nC) over n = `count` inputs."""
    size = len(joint) // count
    return joint.view(count, size, count, size).diagonal(dim1=0, dim2=2).permute(2, 0, 1)


def diagonalised(S: Tensor, gram: Tensor) -> tuple[Tensor, Tensor]:
    """Return γ (s,) and T (s, s) with Tᵀ S T = diag γ and Tᵀ gram T = I."""
    root = cholesky(gram, "The Gram matrix of P")
    half = torch.linalg.solve_triangular(root, S, upper=False)
    whole = torch.linalg.solve_triangular(root, half.T, upper=False)
    values, vectors = torch.linalg.eigh((whole + whole.T) / 2)
    return values.clamp_min(0), torch.linalg.solve_triangular(root.T, vectors, upper=True)
