"""Scores that tell unfamiliar inputs from those of the training distribution: the higher, the less familiar.

`metrics.auroc` tells how well a score separates two sets of inputs.
"""

import torch
from torch import Tensor

from sublaplace.model.prediction import Prediction


def epistemic_variance(prediction: Prediction) -> Tensor:
    """Tr Σ_i / C, the mean variance of the outputs f_i that the posterior of the parameters leaves: (n,), in float64.

    For classification these are variances of logits. Cost: O(nC).
    """
    return prediction.variance.double().mean(1)


def predictive_entropy(prediction: Prediction) -> Tensor:
    """−Σ_c p_ic ln p_ic of the predicted probabilities, at most ln C: (n,), in float64.

    It is high where the classes overlap as well as where the model does not know. For classification alone: yes/no
    outputs are no distribution over classes. Cost: O(nC).
    """
    if not prediction.has_probabilities:
        raise ValueError("A regression has no predictive entropy of classes; use epistemic_variance.")
    probabilities = prediction.probabilities.double()
    if ((probabilities.sum(1) - 1).abs() > 1e-4).any():
        raise ValueError(
            "The probabilities of an input do not sum to one, so they are those of yes/no outputs; use "
            "epistemic_variance."
        )
    return torch.special.entr(probabilities).sum(1)
