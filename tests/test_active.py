"""Active learning: mutual information by brute force, and batches without repetition."""

from itertools import product

import pytest
import torch
from torch import nn

from sublaplace import SubspaceLaplace, active

COUNT = 3


def drawn(K=6, n=7, C=3, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return (3 * torch.randn(K, n, C, generator=generator, dtype=torch.float64)).softmax(2)


def information(probabilities, batch):
    """I(y₁ … y_b; θ), by a sum over all labellings."""
    C = probabilities.shape[2]
    joint = torch.stack(
        [
            torch.stack([probabilities[:, i, c] for i, c in zip(batch, labels, strict=True)]).prod(0).mean()
            for labels in product(range(C), repeat=len(batch))
        ]
    )
    own = sum(torch.special.entr(probabilities[:, i]).sum(1).mean() for i in batch)
    return float(torch.special.entr(joint).sum() - own)


@pytest.mark.parametrize("seed", range(3))
def test_every_step_of_the_search_adds_the_best_input(seed):
    probabilities = drawn(seed=seed)
    found = active.most_informative(probabilities, COUNT).tolist()
    for step in range(COUNT):
        others = [i for i in range(7) if i not in found[:step]]
        best = max(others, key=lambda i: information(probabilities, [*found[:step], i]))
        assert found[step] == best


def test_sampled_labellings_stand_for_all_of_them(monkeypatch):
    probabilities = drawn(K=8, n=6, C=3, seed=5)
    exact = active.most_informative(probabilities, 4).tolist()
    monkeypatch.setattr(active, "_MOST_LABELLINGS", 20_000)
    given, weights = active._sampled(probabilities[:, exact], torch.Generator().manual_seed(0))
    # Of all labellings, Σ p = 1 and Σ entr(p) is the joint entropy: both are estimated by the weighted samples.
    entropy = information(probabilities, exact) + sum(
        float(torch.special.entr(probabilities[:, i]).sum(1).mean()) for i in exact
    )
    p = given.mean(0)
    assert float((weights * p).sum()) == pytest.approx(1)
    assert float((weights * torch.special.entr(p)).sum()) == pytest.approx(entropy, rel=0.02)


def test_a_copy_of_a_chosen_input_tells_less_than_another_one():
    """Two copies of the most informative input: `bald` takes both, the joint criterion does not."""
    certain = torch.tensor([[0.999, 0.001], [0.001, 0.999], [0.999, 0.001], [0.001, 0.999]], dtype=torch.float64)
    other = torch.tensor([[0.9, 0.1], [0.9, 0.1], [0.1, 0.9], [0.1, 0.9]], dtype=torch.float64)
    probabilities = torch.stack([certain, certain, other], dim=1)
    alone = [information(probabilities, [i]) for i in range(3)]
    assert alone[0] == alone[1] > alone[2]
    assert sorted(active.most_informative(probabilities, 2).tolist()) in ([0, 2], [1, 2])


@pytest.fixture(scope="module")
def fitted():
    torch.manual_seed(0)
    x = torch.randn(40, 2)
    model = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 3))
    return SubspaceLaplace(model, "classification", prior_precision=1.0).fit([(x, torch.arange(40) % 3)])


def test_both_criteria_run_on_a_fitted_posterior(fitted):
    pool = torch.randn(30, 2, generator=torch.Generator().manual_seed(1))
    pool[7] = pool[3]
    best = active.bald(fitted, pool, 30)
    information = fitted.predict(pool).mutual_information
    assert torch.equal(information[best], information.sort(descending=True).values)
    found = active.batch_bald(fitted, pool, 6, draws=50)
    assert len(set(found.tolist())) == 6 and torch.equal(found, active.batch_bald(fitted, pool, 6, draws=50))
    other = active.batch_bald(fitted, pool, 6, draws=50, generator=torch.Generator().manual_seed(9))
    assert len(set(other.tolist())) == 6


def test_more_inputs_than_the_pool_holds_are_refused(fitted):
    for choose in (active.bald, active.batch_bald):
        with pytest.raises(ValueError, match="at most the number of inputs in the pool, 4"):
            choose(fitted, torch.randn(4, 2), 5)


def test_regression_has_no_batch_of_labels():
    la = SubspaceLaplace(nn.Linear(2, 1), "regression", prior_precision=1.0).fit(
        [(torch.randn(9, 2), torch.randn(9, 1))]
    )
    with pytest.raises(ValueError, match="likelihood of classes"):
        active.batch_bald(la, torch.randn(5, 2), 2)
    assert len(active.bald(la, torch.randn(5, 2), 2)) == 2
