"""Active learning: which inputs of a pool to label next.

`bald` scores inputs one by one, by what a label would tell about the parameters. The best ones are often alike.
`batch_bald` scores a batch jointly, by function samples (Kirsch, van Amersfoort and Gal, 2019).
"""

from typing import Any

import torch
from torch import Tensor

from sublaplace.laplace import SubspaceLaplace
from sublaplace.runtime.checks import checked_count

_NUMBERS_AT_ONCE = 2**22  # probabilities of labellings: 32 MiB
_MOST_LABELLINGS = 2_000  # of a batch, that are all taken into account; more are sampled


def bald(laplace: SubspaceLaplace, pool: Any, count: int) -> Tensor:
    """Return the inputs with the largest mutual information of label and parameters: indices (count,), best first.

    Cost: one prediction of the pool with its covariances.

    Args:
        laplace: fitted.
        pool: inputs without labels.
        count: how many.

    Raises:
        ValueError: if the pool holds fewer inputs, or outputs have positions.
    """
    information = laplace.predict(pool).mutual_information
    if information.ndim > 1:
        raise ValueError(
            "bald scores inputs, but these outputs have positions. Choose positions, or inputs by a mean over them, "
            "from predict(pool).mutual_information."
        )
    return information.topk(_checked(count, len(information))).indices


def batch_bald(
    laplace: SubspaceLaplace, pool: Any, count: int, draws: int = 100, generator: torch.Generator | None = None
) -> Tensor:
    """Return a batch whose labels together tell most about the parameters: indices (count,), in order of choice.

    Inputs are added one at a time, each the best next to those chosen before. Cost: `draws` function samples, and
    draws·M·n·C per chosen input, where M is the number of labellings of the batch so far, at most 2,000.

    Args:
        laplace: fitted with a likelihood of classes.
        pool: inputs without labels.
        count: how many.
        draws: functions drawn from the posterior.
        generator: of the functions, and of labellings where there are too many of them; None: by the object's seed.

    Raises:
        ValueError: if the pool holds fewer inputs, or the likelihood has no classes.
    """
    outputs = laplace.functional_samples(pool, draws, generator).double()
    probabilities = laplace.likelihood.plain_probabilities(outputs.flatten(0, 1))
    if probabilities is None or probabilities.shape[1] < 2 or ((probabilities.sum(1) - 1).abs() > 1e-4).any():
        raise ValueError("batch_bald needs a likelihood of classes, such as 'classification'.")
    return most_informative(probabilities.view_as(outputs), count, generator)


def most_informative(probabilities: Tensor, count: int, generator: torch.Generator | None = None) -> Tensor:
    r"""Return the batch of largest mutual information I(y₁ … y_b; θ) that a greedy search finds: indices (count,).

    I = H(y₁ … y_b) − Σ E_θ H(y_i | θ), where labels are independent given θ. The joint entropy is a sum over all
    labellings of the batch. If there are more than 2,000, that many are drawn from their distribution.

    Args:
        probabilities: of K draws of θ, n inputs and C classes: (K, n, C).
        count: how many inputs.
        generator: of sampled labellings; None: one with the seed 0.

    Raises:
        ValueError: if there are fewer inputs.
    """
    K, n, C = probabilities.shape
    expected = torch.special.entr(probabilities).sum(2).mean(0)  # E_θ H(y | θ): (n,)
    used = torch.Generator().manual_seed(0) if generator is None else generator
    given = probabilities.new_ones(K, 1)  # p(labelling | θ_k): (K, M)
    weights = probabilities.new_ones(1)  # of the labellings in sums over them
    chosen: list[int] = []
    for _ in range(_checked(count, n)):
        few = max(1, _NUMBERS_AT_ONCE // (given.shape[1] * C))
        entropies = [_joint_entropies(given, weights, part) for part in probabilities.split(few, dim=1)]
        gain = torch.cat(entropies) - expected  # those chosen before add the same to every candidate
        gain[chosen] = -torch.inf
        best = int(gain.argmax())
        chosen.append(best)
        given = (given[:, :, None] * probabilities[:, best, None, :]).flatten(1)
        weights = weights[:, None].expand(-1, C).flatten()
        if given.shape[1] > _MOST_LABELLINGS:
            given, weights = _sampled(probabilities[:, chosen], used)
    return torch.tensor(chosen, device=probabilities.device)


def _joint_entropies(given: Tensor, weights: Tensor, probabilities: Tensor) -> Tensor:
    """Return the entropy of the batch so far together with each of m further inputs, (K, m, C): (m,)."""
    joint = torch.einsum("km,knc->mnc", given, probabilities) / len(given)
    return torch.einsum("m,mn->n", weights, torch.special.entr(joint).sum(2))


def _sampled(probabilities: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return p(labelling | θ_k) of sampled labellings, (K, M), and their weights 1/(M p(labelling)), (M,)."""
    K, b, _ = probabilities.shape
    M = _MOST_LABELLINGS
    device = generator.device
    which = torch.randint(K, (M,), generator=generator, device=device).to(probabilities.device)
    own = probabilities[which].flatten(0, 1).to(device)  # a labelling has the probabilities of one θ
    labels = torch.multinomial(own, 1, generator=generator).view(M, b).to(probabilities.device)
    given = torch.stack([probabilities[:, i, labels[:, i]] for i in range(b)]).prod(0)  # (K, M)
    return given, 1 / (M * given.mean(0))


def _checked(count: int, available: int) -> int:
    if checked_count(count, "count") > available:
        raise ValueError(f"count must be at most the number of inputs in the pool, {available}, but it is {count}.")
    return count
