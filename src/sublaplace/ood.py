"""Out-of-distribution scores: higher for inputs further from the training distribution.

`metrics.auroc` measures how well a score separates two sets of inputs.
"""

import torch
from torch import Tensor

from sublaplace.model.prediction import Prediction


def epistemic_variance(prediction: Prediction) -> Tensor:
    """Return Tr Σ_i / C, the mean variance of the outputs f_i under the posterior: (n,) in float64.

    For classification, these are variances of the logits. Outputs with positions have a score at each of them. Cost:
    O(nC).
    """
    variance = prediction.variance.double()
    return variance if prediction.class_dim is None else variance.mean(prediction.class_dim)


def predictive_entropy(prediction: Prediction) -> Tensor:
    """Return the entropy −Σ_c p_ic ln p_ic of the predicted probabilities, at most ln C: (n,) in float64.

    The entropy is high both where classes overlap and where the model is uncertain. It is defined for classification
    only, because binary outputs are not a distribution over classes. Cost: O(nC).

    Raises:
        ValueError: if the prediction is a regression or has binary outputs.
    """
    if not prediction.has_probabilities:
        raise ValueError("A regression has no predictive entropy of classes; use epistemic_variance.")
    probabilities = prediction.probabilities.double()
    dim = prediction.class_dim
    if dim is None or ((probabilities.sum(dim) - 1).abs() > 1e-4).any():
        raise ValueError(
            "The probabilities of an input do not sum to one: a binary likelihood predicts independent yes/no outputs. "
            "Use epistemic_variance."
        )
    return torch.special.entr(probabilities).sum(dim)
