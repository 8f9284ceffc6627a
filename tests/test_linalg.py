"""Small dense linear algebra against plain formulas."""

import pytest
import torch

from sublaplace.model import linalg
from sublaplace.model.linalg import add_product, gram, orthonormalise, symmetric_product


def randn(*shape, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0), dtype=dtype)


@pytest.mark.parametrize("shape", [(1, 3), (96, 5), (97, 5), (300, 2), (1000, 7), (2, 250, 4), (2, 3, 100, 1)], ids=str)
def test_symmetric_product_is_the_product_with_the_transpose(shape):
    factor = randn(*shape)
    assert torch.allclose(symmetric_product(factor), factor @ factor.mT, rtol=0, atol=1e-12)


def test_symmetric_product_of_a_transposed_view_is_that_of_a_copy():
    factor = randn(4, 200).T
    assert torch.allclose(symmetric_product(factor), factor.contiguous() @ factor.mT, rtol=0, atol=1e-12)


def test_gram_sums_over_the_parameters_in_float64_piece_by_piece():
    # Products that cancel: in float32 their sum would be lost, and one piece of columns would miss the end.
    first = randn(3, 100, dtype=torch.float32)
    second = torch.cat([1e4 * randn(3, 800_000, dtype=torch.float32), first], dim=1)
    vectors = {"first": first, "second": second}
    whole = torch.cat([first, second], dim=1).double()
    found = gram(vectors)
    assert found.dtype == torch.float64
    expected = whole @ whole.T
    assert (found - expected).abs().max() <= 1e-12 * expected.abs().max()


@pytest.mark.parametrize("dtype, most", [(torch.float32, 5e-7), (torch.float64, 1e-13)])
@pytest.mark.parametrize("condition", [1.0, 1e2, 1e6])
def test_vectors_become_orthonormal_and_leading_ones_keep_their_span(dtype, most, condition):
    generator = torch.Generator().manual_seed(0)
    left, _ = torch.linalg.qr(torch.randn(400, 12, dtype=torch.float64, generator=generator))
    right, _ = torch.linalg.qr(torch.randn(12, 12, dtype=torch.float64, generator=generator))
    singular = torch.logspace(0, -torch.tensor(condition).log10().item(), 12, dtype=torch.float64)
    given = ((left * singular) @ right).T.to(dtype)
    basis = orthonormalise({"a": given[:, :300].clone(), "b": given[:, 300:].clone()})
    found = torch.cat([basis["a"], basis["b"]], dim=1).double()
    assert (found @ found.T - torch.eye(12)).abs().max() <= most
    expected, _ = torch.linalg.qr(given.double().T)
    for s in (1, 5, 12):
        inside = expected[:, :s].T @ found[:s].T
        assert torch.allclose(inside @ inside.T, torch.eye(s).double(), atol=100 * most)


@pytest.mark.parametrize("few", [True, False], ids=["beyond the caches", "in the caches"])
@pytest.mark.parametrize("rows", [0, 1, 32, 33, 70])
@pytest.mark.parametrize("shape", [(1, 3), (16, 4096), (50, 9000)], ids=str)
def test_a_product_is_added_whatever_the_pieces(shape, rows, few, monkeypatch):
    if few:
        monkeypatch.setattr(linalg, "_BEYOND_CACHES", 0)
    into, weights, vectors = randn(*shape), randn(rows, shape[0]).T, randn(rows, shape[1])
    expected = into + weights @ vectors
    add_product(into, weights, vectors)
    assert torch.allclose(into, expected, rtol=0, atol=1e-12)
