"""Jacobian blocks: `rows()` against a loop over the definition, every product against `rows()`."""

from dataclasses import replace
from itertools import product

import pytest
import torch

from sublaplace.jacobians.blocks import EmbeddingBlock, OuterBlock, OuterUse, RowBlock, SumBlock, summed

TOLERANCE = 1e3 * torch.finfo(torch.float64).eps


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def outer_block(n=3, K=2, G=1, O=4, I=5, T=1, transposed=False, seed=0):
    return OuterBlock.of(randn(n, G, I, T, seed=seed), randn(n, K, G, O, T, seed=seed + 1), transposed)


def twice(first, second):
    """A map that is called twice."""
    return OuterBlock((*first.uses, *second.uses), first.num_rows, first.transposed)


def positions_first(block):
    """The same block with gradients that hold the outputs innermost, as convolutions that run channels last leave them,
    and inputs that hold a feature of all inputs together, as patches are made."""
    uses = tuple(
        replace(
            use,
            inputs=use.inputs.permute(1, 2, 0, 3).contiguous().permute(2, 0, 1, 3),
            gradients=tuple(g.transpose(2, 3).contiguous().transpose(2, 3) for g in use.gradients),
        )
        for use in block.uses
    )
    return replace(block, uses=uses)


def bias_block(n=3, K=2, O=20, T=6):
    gradients = randn(n, K, 1, O, T).unbind(1)
    ones = torch.ones(1, dtype=torch.float64).expand(n, 1, 1, T)
    return OuterBlock((OuterUse(ones, gradients, O, is_bias=True),), K)


def embedding_block(n=3, K=2, T=4, D=5, num_rows=4, seed=0):
    generator = torch.Generator().manual_seed(seed)
    indices = torch.randint(0, num_rows - 1, (n, T), generator=generator)  # the last row of the table is never used
    indices[0, :2] = 1  # and one is used twice by the same input
    return EmbeddingBlock(indices, randn(n, K, T, D, seed=seed + 1), num_rows)


def loop_rows(block):
    """Σ_t g_t a_tᵀ, one number after the other."""
    if isinstance(block, RowBlock):
        return block.values
    if isinstance(block, SumBlock):
        return sum(loop_rows(part) for part in block.parts)
    if isinstance(block, EmbeddingBlock):
        n, K, T, D = block.gradients.shape
        rows = torch.zeros(n, K, block.table_rows, D, dtype=torch.float64)
        for i, k, t in product(range(n), range(K), range(T)):
            rows[i, k, block.indices[i, t]] += block.gradients[i, k, t]
        return rows.reshape(n, K, -1)
    n, K, G, O, I = block.num_inputs, block.num_rows, block.groups, block.fan_out, block.fan_in
    rows = torch.zeros(n, K, G, O, I, dtype=torch.float64)
    for use in block.uses:
        for i, k, g, t in product(range(n), range(K), range(G), range(use.positions)):
            rows[i, k, g] += torch.outer(use.gradients[k][i, g, :, t], use.inputs[i, g, :, t])
    if block.transposed:
        rows = rows.transpose(3, 4)
    return rows.reshape(n, K, -1)


def close(value, expected):
    assert value.shape == expected.shape
    scale = float(expected.abs().max()) if expected.numel() else 0.0
    return expected.numel() == 0 or float((value - expected).abs().max()) <= TOLERANCE * scale


FORMS = {
    f"{'transposed ' if transposed else ''}outer, {groups} group(s), {T} position(s)": outer_block(
        G=groups, T=T, transposed=transposed, O=4, I=3
    )
    for transposed, groups, T in product((False, True), (1, 3), (1, 6))
}
FORMS |= {
    "outer, one direction": outer_block(K=1, T=1),
    "outer, one direction, many positions": outer_block(K=1, T=7),
    "outer, called twice": twice(outer_block(T=2), outer_block(T=3, seed=5)),
    "outer, called twice at one position": twice(outer_block(), outer_block(seed=5)),
    "outer, grouped, called twice": twice(outer_block(G=3, O=4, I=3, T=2), outer_block(G=3, O=4, I=3, T=3, seed=5)),
    "transposed outer, called twice": twice(outer_block(T=2, transposed=True), outer_block(T=9, seed=5)),
    "outer, positions first in memory": positions_first(outer_block(T=6)),
    "outer, wide, positions first in memory": positions_first(outer_block(T=6, O=3, I=40)),
    "outer, grouped, positions first in memory": positions_first(outer_block(G=3, T=6)),
    "outer, called twice, positions first in memory": positions_first(
        twice(outer_block(T=2), outer_block(T=3, seed=5))
    ),
    "bias": bias_block(),
    "bias, one position": bias_block(T=1),
    "embedding": embedding_block(),
    "embedding, one position": embedding_block(T=2, n=2),
    "rows": RowBlock(randn(3, 2, 20)),
    "embedding tied to a linear map": SumBlock((embedding_block(), outer_block(O=4, I=5, T=2, seed=7))),
    "linear map and rows": SumBlock((outer_block(), RowBlock(randn(3, 2, 20, seed=9)))),
}


@pytest.fixture(params=FORMS.values(), ids=FORMS.keys())
def block(request):
    return request.param


def test_rows_equal_a_loop_over_the_definition(block):
    assert close(block.rows(), loop_rows(block))
    assert block.size == block.rows().shape[2]


@pytest.mark.parametrize("count", [1, 3, 40])
def test_matmul_equals_rows_times_vectors(block, count):
    vectors = randn(count, block.size, seed=3)
    assert close(block.matmul(vectors), block.rows() @ vectors.T)


@pytest.mark.parametrize("at_once", [1, 31, 61, 100])
@pytest.mark.parametrize("arranged", [lambda block: block, positions_first])
@pytest.mark.parametrize(
    "block",
    [
        outer_block(O=7, I=5, T=40),
        twice(outer_block(O=7, I=5, T=30), outer_block(O=7, I=5, T=9, seed=5)),
        outer_block(O=7, I=5, T=40, transposed=True),
        outer_block(G=2, O=4, I=5, T=40),
    ],
    ids=["one call", "two calls", "transposed", "grouped"],
)
def test_rows_of_which_few_are_formed_at_once_give_the_same_products(block, arranged, at_once, monkeypatch):
    monkeypatch.setattr("sublaplace.jacobians.blocks.ROWS_AT_ONCE", at_once)
    block = arranged(block)
    vectors, weights = randn(3, block.size, seed=2), randn(3, 2, 3, seed=3)
    assert not block.factors_first(3)
    assert close(block.matmul(vectors), loop_rows(block) @ vectors.T)
    into = randn(3, block.size, seed=4)
    expected = into + torch.einsum("nkr,nkp->rp", weights, loop_rows(block))
    block.add_transpose_matmul(weights, into)
    assert close(into, expected)


@pytest.mark.parametrize("count", [1, 3, 40])
def test_transposed_rows_times_weights_are_added(block, count):
    n, K, _ = block.rows().shape
    weights, before = randn(n, K, count, seed=4), randn(count, block.size, seed=5)
    into = before.clone()
    block.add_transpose_matmul(weights, into)
    assert close(into, before + torch.einsum("nkr,nkp->rp", weights, block.rows()))


def test_squared_sum_equals_that_of_the_rows(block):
    assert close(block.squared_sum(), block.rows().square().sum((0, 1)))


@pytest.mark.parametrize("indices", [[0], [3, 0, 7], list(range(11, -1, -1)), [2, 2, 5]], ids=str)
def test_columns_equal_those_of_the_rows(block, indices):
    chosen = torch.tensor(indices)
    assert close(block.columns(chosen), block.rows()[:, :, chosen])


def test_all_columns_in_any_order_equal_those_of_the_rows(block):
    order = torch.randperm(block.size, generator=torch.Generator().manual_seed(0))
    assert close(block.columns(order), block.rows()[:, :, order])


@pytest.mark.parametrize(
    ("form", "count", "factors_first"),
    [
        ({"T": 1, "K": 3}, 6, True),
        ({"T": 1, "K": 1}, 1, True),
        ({"T": 1, "K": 1}, 8, False),
        ({"T": 6, "K": 2}, 1, True),
        ({"T": 6, "K": 2}, 9, False),
        ({"T": 2, "K": 5, "G": 3}, 9, True),
        ({"T": 9, "K": 2, "G": 3}, 9, False),
    ],
    ids=str,
)
@pytest.mark.parametrize("transposed", [False, True])
def test_both_orders_of_contraction_give_the_same_product(form, count, factors_first, transposed):
    block = outer_block(**form, transposed=transposed)
    assert block.factors_first(count) is factors_first
    vectors, weights = randn(count, block.size, seed=3), randn(3, form["K"], count, seed=4)
    assert close(block.matmul(vectors), loop_rows(block) @ vectors.T)
    into = torch.zeros(count, block.size, dtype=torch.float64)
    block.add_transpose_matmul(weights, into)
    assert close(into, torch.einsum("nkr,nkp->rp", weights, loop_rows(block)))


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("T", [1, 3, 5, 9])  # turned first: both sides, or the inputs, or none
@pytest.mark.parametrize("calls", [1, 2])
@pytest.mark.parametrize("memory", [lambda block: block, positions_first], ids=["as made", "positions first"])
def test_rotated_rows_are_the_rows_in_other_bases(T, transposed, calls, memory):
    block = memory(outer_block(G=2, O=3, I=4, T=T, transposed=transposed))
    if calls == 2:
        block = twice(block, memory(outer_block(G=2, O=3, I=4, T=2, seed=5)))
    into_inputs, into_outputs = torch.linalg.qr(randn(2, 4, 4))[0], torch.linalg.qr(randn(2, 3, 3))[0]
    stored = block.rows().unflatten(2, (2, 4, 3) if transposed else (2, 3, 4))
    maps = stored.transpose(3, 4) if transposed else stored
    expected = torch.einsum("gop,nkgoi,gij->nkgpj", into_outputs, maps, into_inputs)
    expected = (expected.transpose(3, 4) if transposed else expected).flatten(2)
    assert close(block.rotated_rows(into_inputs, into_outputs), expected)


@pytest.mark.parametrize("T", [1, 4])
def test_rotated_rows_of_a_bias_are_its_rows_in_other_bases(T):
    block = bias_block(T=T)
    into_inputs, into_outputs = -torch.ones(1, 1, 1, dtype=torch.float64), torch.linalg.qr(randn(1, 20, 20))[0]
    assert close(block.rotated_rows(into_inputs, into_outputs), -block.rows() @ into_outputs[0])


def test_rotated_rows_of_an_embedding_are_its_rows_in_another_output_basis():
    block = embedding_block()
    into_outputs = torch.linalg.qr(randn(1, 5, 5))[0]
    expected = (block.rows().unflatten(2, (4, 5)) @ into_outputs[0]).flatten(2)
    assert close(block.rotated_rows(None, into_outputs), expected)


def test_moments_sum_outer_products_over_inputs_directions_and_positions():
    block = outer_block(n=3, K=2, G=2, O=3, I=4, T=5)
    inputs, gradients = torch.zeros(2, 4, 4).double(), torch.zeros(2, 3, 3).double()
    for i, g, t in product(range(3), range(2), range(5)):
        inputs[g] += torch.outer(block.inputs[i, g, :, t], block.inputs[i, g, :, t])
        for k in range(2):
            gradients[g] += torch.outer(block.gradients[i, k, g, :, t], block.gradients[i, k, g, :, t])
    assert close(block.input_moment(), inputs)
    assert close(block.gradient_moment(), gradients)
    assert block.num_terms() == 15


def test_moments_of_an_embedding_equal_those_of_its_one_hot_form():
    block = embedding_block()
    one_hot = torch.nn.functional.one_hot(block.indices, block.table_rows).double()  # (n, T, I)
    dense = OuterBlock.of(one_hot.transpose(1, 2).unsqueeze(1), block.gradients.transpose(2, 3).unsqueeze(2), True)
    assert close(dense.rows(), block.rows())
    assert close(torch.diag_embed(block.input_moment()), dense.input_moment())
    assert close(block.gradient_moment(), dense.gradient_moment())
    assert block.num_terms() == dense.num_terms()


def test_reduced_block_averages_inputs_and_sums_gradients():
    block = outer_block(T=4)
    reduced = block.reduced()
    assert reduced.positions == 1
    expected = torch.einsum("nko,ni->nkoi", block.gradients.sum(-1)[:, :, 0], block.inputs.mean(-1)[:, 0]).flatten(2)
    assert close(reduced.rows(), expected)


def test_reduced_block_with_equal_inputs_at_all_positions_has_the_same_rows():
    block = OuterBlock.of(randn(3, 1, 5, 1).expand(3, 1, 5, 4), randn(3, 2, 1, 4, 4, seed=1))
    assert close(block.reduced().rows(), block.rows())


SEVERAL_USES = {
    "linear maps": ([outer_block(T=2), outer_block(T=3, seed=5)], OuterBlock),
    "embeddings": ([embedding_block(), embedding_block(seed=5)], EmbeddingBlock),
    "rows": ([RowBlock(randn(3, 2, 20)), RowBlock(randn(3, 2, 20, seed=5))], RowBlock),
    "a linear map and its transpose": ([outer_block(), outer_block(O=5, I=4, transposed=True, seed=5)], SumBlock),
    "an embedding and a linear map": ([embedding_block(), outer_block(seed=5)], SumBlock),
    "a linear map alone": ([outer_block()], OuterBlock),
}


@pytest.mark.parametrize(("blocks", "kind"), SEVERAL_USES.values(), ids=SEVERAL_USES.keys())
def test_several_uses_of_a_parameter_add_up(blocks, kind):
    result = summed(blocks)
    assert isinstance(result, kind)
    assert close(result.rows(), sum(loop_rows(block) for block in blocks))


@pytest.mark.parametrize("T", [2, 5, 30])  # fewer and more positions than channels
@pytest.mark.parametrize("memory", [lambda block: block, positions_first], ids=["as made", "positions first"])
def test_moments_of_several_calls_add_up(T, memory):
    first, second = memory(outer_block(G=2, T=T)), memory(outer_block(G=2, T=3, seed=5))
    both = twice(first, second)
    assert close(both.input_moment(), torch.einsum("ngit,ngjt->gij", both.inputs, both.inputs))
    assert close(both.gradient_moment(), torch.einsum("nkgot,nkgpt->gop", both.gradients, both.gradients))
    assert both.num_terms() == first.num_terms() + second.num_terms() == 3 * (T + 3)


def test_blocks_have_one_gradient_key_only_where_they_have_the_same_gradients():
    weight = outer_block(T=4)
    gradients = weight.uses[0].gradients
    ones = torch.ones(3, 1, 1, 1, dtype=torch.float64)
    bias = OuterBlock((OuterUse(ones.expand(3, 1, 1, 4), gradients, 4),), 2)
    assert weight.gradient_key == bias.gradient_key
    fewer = OuterBlock((OuterUse(ones.expand(3, 1, 1, 2), tuple(g[..., :2] for g in gradients), 4),), 2)
    assert weight.gradient_key != fewer.gradient_key
    single = tuple(g[..., :1] for g in gradients)
    once = OuterBlock((OuterUse(ones, single, 4),), 2)
    repeated = OuterBlock((OuterUse(ones.expand(3, 1, 1, 4), tuple(g.expand(3, 1, 4, 4) for g in single), 4),), 2)
    assert once.gradient_key != repeated.gradient_key


@pytest.mark.parametrize("T", [1, 3])
def test_a_block_without_directions_has_empty_rows_but_keeps_its_inputs(T):
    block = outer_block(K=0, T=T)
    assert block.rows().shape == (3, 0, 20)
    assert block.matmul(randn(4, 20)).shape == (3, 0, 4)
    into = torch.ones(4, 20).double()
    block.add_transpose_matmul(randn(3, 0, 4), into)
    assert torch.equal(into, torch.ones(4, 20).double())
    assert torch.equal(block.squared_sum(), torch.zeros(20).double())
    assert torch.equal(block.gradient_moment(), torch.zeros(1, 4, 4).double())
    assert close(block.input_moment(), torch.einsum("ngit,ngjt->gij", block.inputs, block.inputs))
