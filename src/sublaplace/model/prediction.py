"""What is predicted for new inputs."""

from dataclasses import dataclass, replace
from functools import cached_property
from statistics import NormalDist
from typing import NamedTuple

import torch
from torch import Tensor

from sublaplace.model.borrowing import full_precision
from sublaplace.model.likelihoods.base import Likelihood
from sublaplace.model.likelihoods.links import Covariance, Interval, normal_product
from sublaplace.model.output_layout import OutputLayout

_ENTROPY_DRAWS = 256  # of the logits, for the entropy that is expected under the posterior


class Top(NamedTuple):
    """The k most probable classes of n inputs, (n, k) each, most probable first; with positions like the outputs."""

    classes: Tensor
    probabilities: Tensor
    variance: Tensor


@dataclass(frozen=True, repr=False)
class Prediction:
    """The prediction for n inputs; what is not asked for is not computed.

    With a likelihood with probabilities, `total`, `aleatoric` and `epistemic` are entropies in nats, (n,); otherwise
    they are covariances of the targets, (n, C, C). In both cases total = aleatoric + epistemic.

    Outputs with positions, (n, …), are predicted position by position. What is (n, C) otherwise has the shape of the
    outputs, what is (n,) is a map of the positions, and what is (n, C, C) holds the classes behind the positions. If
    every entry is an output of its own, all three have the shape of the outputs.
    """

    outputs: Tensor
    """The network's outputs with a row for each position, (n·L, C)."""
    likelihood: Likelihood
    """The likelihood of a position."""
    uncertainty: Covariance
    link: str = "probit"
    samples: int = 1000
    seed: int = 0
    layout: OutputLayout | None = None
    """The arrangement of the outputs; None: they have no positions."""

    @property
    def mean(self) -> Tensor:
        """The network's outputs f, (n, C)."""
        return self._arranged(self.outputs)

    @property
    def class_dim(self) -> int | None:
        """The dimension of `mean` with the classes; None: every entry is an output of its own."""
        if self.layout is None:
            return 1
        return None if self.layout.class_axis is None else self.layout.class_axis + 1

    def _arranged(self, rows: Tensor) -> Tensor:
        """Return numbers (n·L, C) in the arrangement of the outputs."""
        if self.layout is None:
            return rows
        return self.layout.arranged(rows.reshape(-1, self.layout.num_outputs))

    def _map(self, values: Tensor) -> Tensor:
        """Return numbers of positions, (n·L,) or (n·L, C, C), as maps."""
        if self.layout is None:
            return values
        return self.layout.map_of(values[:, 0, 0] if self.class_dim is None and values.ndim > 1 else values)

    def __repr__(self) -> str:
        kind = self.likelihood.name or type(self.likelihood).__name__
        link = f", link='{self.link}'" if self.has_probabilities else ""
        parts = [f"mean {tuple(self.mean.shape)}", f"variance {tuple(self.variance.shape)}"]
        formed = f"covariance {'formed' if self.uncertainty.is_formed else 'not formed yet'}"
        return f"Prediction({kind}{link}, {', '.join(parts)}, {formed})"

    @property
    def variance(self) -> Tensor:
        """The posterior variance of each output, without noise: (n, C)."""
        return self._arranged(self.uncertainty.variance)

    @property
    def covariance(self) -> Tensor:
        """The posterior covariance of the outputs, without noise: (n, C, C); with positions of each of them."""
        return self._map(self.uncertainty.matrix)

    @property
    def probabilities(self) -> Tensor:
        """The probability of each class, (n, C); for yes/no outputs the probability of yes.

        Raises:
            ValueError: for a likelihood without probabilities, such as regression.
        """
        return self._arranged(self._probabilities)

    @cached_property
    def _probabilities(self) -> Tensor:
        generator = torch.Generator().manual_seed(self.seed)
        with full_precision(self.outputs.device):
            found = self.likelihood.probabilities(self.outputs, self.uncertainty, self.link, self.samples, generator)
        if found is None:
            raise ValueError(
                f"A prediction of kind '{self.likelihood.name}' has no probabilities; use mean and variance."
            )
        return found

    @property
    def has_probabilities(self) -> bool:
        """Whether the likelihood is one of classes or yes/no outputs."""
        return self.likelihood.has_probabilities

    @property
    def total(self) -> Tensor:
        """The whole uncertainty: the entropy of the averaged probabilities (n,), or Σ + σ² (n, C, C)."""
        return self._map(
            self._entropies[0] if self.has_probabilities else self.uncertainty.matrix + self._noise_matrices()
        )

    @property
    def aleatoric(self) -> Tensor:
        """The share that more data would not remove: the expected entropy (n,), or σ² (n, C, C)."""
        return self._map(self._entropies[1] if self.has_probabilities else self._noise_matrices())

    def _noise_matrices(self) -> Tensor:
        n, C = self.outputs.shape
        return self._noise_variances().expand(C).diag().expand(n, C, C)

    @property
    def epistemic(self) -> Tensor:
        """The share that more data would remove: the mutual information (n,), or Σ (n, C, C)."""
        return self.mutual_information if self.has_probabilities else self.covariance

    @cached_property
    def mutual_information(self) -> Tensor:
        """What a label would tell about the parameters, H[E p] − E[H p] in nats (BALD): (n,), in float64."""
        if self.has_probabilities:
            return self._map((self._entropies[0] - self._entropies[1]).clamp_min(0))
        noise = self._noise_matrices().double()
        whole = torch.linalg.solve(noise, self.uncertainty.matrix.double() + noise)
        return self._map(0.5 * torch.linalg.slogdet(whole).logabsdet)

    @cached_property
    def _entropies(self) -> tuple[Tensor, Tensor]:
        """The entropy of averaged probabilities and the average entropy, (n,) each, over 256 draws of the outputs.

        Cost: C³ per input and 256·n·C²; in a subspace of s < C dimensions 256·n·C·s.
        """
        with full_precision(self.outputs.device):
            return self._drawn_entropies(torch.Generator().manual_seed(self.seed))

    def _drawn_entropies(self, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        factor, mean = self.uncertainty.factor.double(), self.outputs.double()
        expected = torch.zeros(len(mean), dtype=torch.float64, device=mean.device)
        averaged = torch.zeros_like(mean)
        for _ in range(_ENTROPY_DRAWS):
            drawn = mean + normal_product(factor, generator)
            probabilities = self.likelihood.plain_probabilities(drawn)
            assert probabilities is not None
            expected += self.likelihood.entropy(probabilities) / _ENTROPY_DRAWS
            averaged += probabilities / _ENTROPY_DRAWS
        return self.likelihood.entropy(averaged), expected

    def _noise_variances(self) -> Tensor:
        """Return σ², one or one per output.

        Raises:
            ValueError: for a likelihood without noise, whose targets have no such variance.
        """
        if not self.likelihood.has_target_variance:
            raise ValueError(
                f"A likelihood of kind '{self.likelihood.name}' has no noise variance; use mean and covariance, which "
                "are those of the outputs, or give it `noise_variances`."
            )
        return torch.tensor(self.likelihood.noise_variances, dtype=self.outputs.dtype, device=self.outputs.device)

    def top(self, count: int = 5) -> "Top":
        """Return the most probable classes of each input, with their probabilities and the variances of their outputs.

        Raises:
            ValueError: for a likelihood without probabilities, or more classes than there are.
        """
        if self.class_dim is None:
            raise ValueError("Every entry of these outputs is a prediction of its own, so none is the most probable.")
        C = self.outputs.shape[1]
        if not 1 <= count <= C:
            raise ValueError(f"count must lie between 1 and the number of classes, {C}, but it is {count}.")
        probabilities, classes = self._probabilities.topk(count, dim=1)
        found = (classes, probabilities, self.uncertainty.variance.gather(1, classes))
        if self.layout is None:
            return Top(*found)
        few = self.layout.with_classes(count)
        return Top(*(few.arranged(part.reshape(-1, few.num_outputs)) for part in found))

    def plain(self) -> "Prediction":
        """Return the prediction of the network alone, without any posterior uncertainty."""
        zero = torch.zeros_like(self.outputs)
        return replace(self, uncertainty=Covariance(zero, lambda: torch.diag_embed(zero)))

    def interval(self, level: float = 0.9) -> Interval:
        """Return the central interval of each target at this level, with the noise: two tensors (n, C).

        Raises:
            ValueError: for a likelihood with probabilities, or a level outside of (0, 1).
        """
        if self.has_probabilities:
            raise ValueError("Classes have no interval; use probabilities.")
        if not 0 < level < 1:
            raise ValueError(f"level must lie between 0 and 1, but it is {level}.")
        noise = self._noise_variances()
        half = NormalDist().inv_cdf((1 + level) / 2) * (self.variance + noise).sqrt()
        return Interval(self.mean - half, self.mean + half)
