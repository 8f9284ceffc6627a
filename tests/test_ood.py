"""Scores of unfamiliar inputs, by hand and on data where familiarity is plain."""

from math import log

import pytest
import torch
from torch import nn

from sublaplace import Bernoulli, Categorical, Gaussian, Prediction, SubspaceLaplace, metrics
from sublaplace.model.likelihoods.links import Covariance
from sublaplace.ood import epistemic_variance, predictive_entropy


def predicted(mean, covariance, likelihood):
    return Prediction(mean, likelihood, Covariance(covariance.diagonal(dim1=1, dim2=2), lambda: covariance))


def test_entropy_and_variance_by_hand():
    probabilities = torch.tensor([[0.5, 0.5, 0.0], [1.0, 0.0, 0.0], [1 / 3, 1 / 3, 1 / 3]], dtype=torch.float64)
    covariance = torch.tensor([[1.0, 9.0, 9.0], [9.0, 2.0, 9.0], [9.0, 9.0, 6.0]]).expand(3, 3, 3)
    certain = predicted(probabilities.log().clamp_min(-1e4), torch.zeros(3, 3, 3), Categorical())
    assert predictive_entropy(certain).tolist() == pytest.approx([log(2), 0.0, log(3)])
    uncertain = predicted(torch.zeros(3, 3), covariance, Categorical())
    assert epistemic_variance(uncertain).tolist() == pytest.approx([3.0, 3.0, 3.0])
    assert epistemic_variance(uncertain).dtype == predictive_entropy(uncertain).dtype == torch.float64


def test_inputs_far_from_the_training_data_score_higher():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 2))
        inputs = torch.randn(200, 2)
        far = 8 * torch.nn.functional.normalize(torch.randn(100, 2))
        labels = (inputs[:, 0] > 0).long()
        optimizer = torch.optim.Adam(model.parameters(), 0.02)
        for _ in range(200):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
    la = SubspaceLaplace.paper(model, "classification", projector="full").fit([(inputs, labels)])
    familiar, unfamiliar = la.predict(inputs), la.predict(far)
    assert metrics.auroc(epistemic_variance(unfamiliar), epistemic_variance(familiar)) > 0.95


def test_what_is_no_distribution_over_classes_has_no_entropy():
    covariance = torch.ones(2, 2, 2)
    with pytest.raises(ValueError, match="regression has no predictive entropy"):
        predictive_entropy(predicted(torch.zeros(2, 2), covariance, Gaussian(0.1)))
    with pytest.raises(ValueError, match="yes/no outputs"):
        predictive_entropy(predicted(torch.full((2, 2), 3.0), covariance, Bernoulli()))
