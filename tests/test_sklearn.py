"""The estimators as scikit-learn's users know them."""

import pickle
import subprocess
import sys

import numpy as np
import pytest
import torch
from sklearn.base import clone
from sklearn.datasets import load_diabetes, load_iris, make_regression
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import PolynomialFeatures
from sklearn.utils.estimator_checks import check_estimator
from test_laplace import sized

from sublaplace import PROJECTORS, Categorical, SubspaceLaplace
from sublaplace.sklearn import (
    SubspaceLaplaceClassifier,
    SubspaceLaplaceRegressor,
    _split,
    log_predictive_density,
)

BOTH = [SubspaceLaplaceClassifier, SubspaceLaplaceRegressor]
POSTERIORS = [(projector, None) for projector in [*PROJECTORS, "full"]] + [
    (projector, complement) for projector in ("lowrank-kfac", "subset-magnitude") for complement in ("kfac", "diagonal")
]


@pytest.fixture(scope="module")
def diabetes():
    return load_diabetes(return_X_y=True)


@pytest.fixture(scope="module")
def iris():
    return load_iris(return_X_y=True)


@pytest.mark.slow
@pytest.mark.parametrize("estimator", BOTH)
def test_check_estimator_passes(estimator):
    results = check_estimator(estimator(max_iter=30), on_skip=None)
    assert {result["status"] for result in results if result["check_name"] != "check_array_api_input"} == {"passed"}


@pytest.mark.parametrize(("projector", "complement"), POSTERIORS)
def test_every_posterior_gives_uncertainty(projector, complement, iris, diabetes):
    options = {**sized(projector, 8), "complement": complement, "max_iter": 20, "random_state": 0}
    classifier = SubspaceLaplaceClassifier(**options).fit(*iris)
    probabilities = classifier.predict_proba(iris[0])
    assert probabilities.shape == (150, 3)
    np.testing.assert_allclose(probabilities.sum(1), 1)
    with torch.no_grad():
        plain = classifier.laplace_.model(torch.tensor(iris[0])).softmax(1).numpy()
    # A single direction may tip one class up, but on the whole the posterior makes probabilities less sure.
    assert probabilities.max(1).mean() <= plain.max(1).mean() + 1e-12
    regressor = SubspaceLaplaceRegressor(**options).fit(*diabetes)
    _, std = regressor.predict(diabetes[0], return_std=True)
    assert (std >= regressor.noise_std_ * (1 - 1e-12)).all()
    if projector != "subset-diagonal":  # its few parameters may be dead
        assert std.max() > regressor.noise_std_ * (1 + 1e-6)


def test_std_and_covariance_agree_and_have_the_shapes_of_a_gaussian_process(diabetes):
    inputs, targets = diabetes
    for values in (targets, targets[:, None], np.column_stack([targets, -3 * targets + inputs[:, 0]])):
        process = GaussianProcessRegressor(optimizer=None).fit(inputs[:50], values[:50])
        laplace = SubspaceLaplaceRegressor(max_iter=20, random_state=0).fit(inputs, values)
        for option in ("return_std", "return_cov"):
            expected = process.predict(inputs[:5], **{option: True})
            found = laplace.predict(inputs[:5], **{option: True})
            if values.shape[1:] == (1,):  # scikit-learn's drops the dimension of a single column; we keep that of y
                expected = [part[..., None] for part in expected]
            assert [part.shape for part in found] == [part.shape for part in expected]
            np.testing.assert_allclose(found[0], laplace.predict(inputs[:5]), rtol=1e-12)
        _, std = laplace.predict(inputs[:5], return_std=True)
        _, covariance = laplace.predict(inputs[:5], return_cov=True)
        np.testing.assert_allclose(covariance[np.arange(5), np.arange(5)], std**2, rtol=1e-9)
        np.testing.assert_allclose(covariance, covariance.swapaxes(0, 1), rtol=1e-9)
    with pytest.raises(ValueError, match="not for both"):
        laplace.predict(inputs, return_std=True, return_cov=True)


def test_the_network_is_the_map_under_the_very_prior_and_noise_of_the_posterior():
    inputs, targets = make_regression(80, 4, noise=30.0, random_state=0)
    regressor = SubspaceLaplaceRegressor(
        hidden_layer_sizes=(5,), learning_rate=0.05, max_iter=1000, batch_size=80, random_state=0
    )
    regressor.fit(inputs, targets)
    la = regressor.laplace_
    assert la.prior_precision == regressor.prior_precision_
    standardised = torch.tensor((targets - targets.mean()) / targets.std())[:, None]
    parameters = list(la.model.parameters())
    loss = 0.5 * (la.model(torch.tensor(inputs)) - standardised).square().sum() / la.noise_std**2
    of_data = torch.cat([gradient.flatten() for gradient in torch.autograd.grad(loss, parameters)])
    of_prior = la.prior_precision * torch.cat([parameter.detach().flatten() for parameter in parameters])
    # The pulls of data and prior cancel.
    assert (of_data + of_prior).norm() <= 0.01 * of_prior.norm()
    assert len(regressor.loss_curve_) == regressor.n_iter_ == 1000


def test_noise_and_prior_precision_are_found_or_taken_as_given():
    generator = np.random.RandomState(0)
    inputs = generator.randn(300, 3)
    targets = 100 * (inputs[:, 0] + 0.2 * generator.randn(300))
    tuned = SubspaceLaplaceRegressor(random_state=0, max_iter=100).fit(inputs, targets)
    assert tuned.noise_std_ == pytest.approx(20, rel=0.15)
    fixed_prior = clone(tuned).set_params(prior_precision=2.0).fit(inputs, targets)
    assert fixed_prior.prior_precision_ == fixed_prior.laplace_.prior_precision == 2.0
    assert fixed_prior.noise_std_ == pytest.approx(20, rel=0.15)
    given = clone(tuned).set_params(noise_std=30.0).fit(inputs, targets)
    assert given.noise_std_ == pytest.approx(30.0)
    pairs = np.column_stack([targets, targets / 10])
    each = clone(tuned).set_params(noise_std=[30.0, 2.0], prior_precision=1.0).fit(inputs, pairs)
    np.testing.assert_allclose(each.noise_std_, [30.0, 2.0])


def test_by_default_kfac_is_outside_with_a_fitted_weight_for_regression(iris, diabetes):
    classifier = SubspaceLaplaceClassifier(max_iter=10, random_state=0).fit(*iris)
    assert classifier.laplace_.complement_weight == 1.0
    regressor = SubspaceLaplaceRegressor(max_iter=10, random_state=0).fit(*diabetes)
    assert regressor.laplace_.complement_weight not in (None, 1.0)
    bare = clone(regressor).set_params(complement=None).fit(*diabetes)
    assert bare.laplace_.complement_weight is None
    assert bare.prior_precision_ == regressor.prior_precision_  # of the training, whatever the posterior
    np.testing.assert_array_equal(bare.predict(diabetes[0]), regressor.predict(diabetes[0]))


def test_only_auto_gives_the_posterior_of_a_classifier_a_prior_precision_of_its_own(iris):
    auto = SubspaceLaplaceClassifier(max_iter=20, random_state=0).fit(*iris)
    trained = clone(auto).set_params(prior_precision="evidence").fit(*iris)
    assert trained.loss_curve_ == auto.loss_curve_  # the same network
    assert auto.prior_precision_ != trained.prior_precision_
    direct = SubspaceLaplace(auto.laplace_.model, "classification").fit(
        [(torch.tensor(iris[0]), torch.tensor(iris[1]))]
    )
    assert auto.prior_precision_ == pytest.approx(direct.prior_precision, rel=0.5)  # other inputs are drawn
    given = clone(auto).set_params(prior_precision=3.0).fit(*iris)
    assert given.prior_precision_ == given.laplace_.prior_precision == 3.0


@pytest.mark.parametrize("estimator", BOTH)
def test_a_part_of_the_data_is_held_out_to_tune_prior_precision_and_noise(estimator, iris, diabetes):
    inputs, targets = iris if estimator is SubspaceLaplaceClassifier else diabetes
    fitted = estimator(max_iter=20, validation_fraction=0.2, random_state=0).fit(inputs, targets)
    summary = fitted.laplace_.summary()
    assert f"{round(0.2 * len(inputs) + 0.4)} validation inputs" in summary
    kept = len(inputs) - round(0.2 * len(inputs) + 0.4)
    assert f"{kept} inputs" in summary
    again = clone(fitted).fit(inputs, targets)
    assert again.prior_precision_ == fitted.prior_precision_ == fitted.laplace_.prior_precision
    assert clone(fitted).set_params(random_state=1).fit(inputs, targets).prior_precision_ != fitted.prior_precision_


def test_a_given_noise_is_not_tuned_on_validation_data(diabetes):
    options = {"max_iter": 20, "validation_fraction": 0.2, "random_state": 0}
    given = SubspaceLaplaceRegressor(noise_std=30.0, **options).fit(*diabetes)
    assert given.noise_std_ == pytest.approx(30.0)
    tuned = SubspaceLaplaceRegressor(**options).fit(*diabetes)
    assert tuned.noise_std_ != pytest.approx(30.0)


def test_every_class_keeps_its_share_in_the_held_out_data():
    inputs = np.random.RandomState(0).randn(100, 2)
    labels = np.repeat([0, 1], [90, 10])
    kept, held_out = _split(torch.tensor(labels), 0.2, Categorical(), seed=0)
    assert [int(labels[part].sum()) for part in (kept, held_out)] == [8, 2]
    assert sorted([*kept.tolist(), *held_out.tolist()]) == list(range(100))
    with pytest.raises(ValueError, match="least populated class"):
        SubspaceLaplaceClassifier(validation_fraction=0.2).fit(inputs, np.repeat([0, 1], [99, 1]))


def test_a_classifier_holds_out_a_tenth_of_200_inputs_or_more():
    inputs = np.random.RandomState(0).randn(220, 2)
    labels = (inputs[:, 0] > 0).astype(int)

    def summary(count=220, classes=labels, **options):
        found = SubspaceLaplaceClassifier(max_iter=2, random_state=0, **options).fit(inputs[:count], classes[:count])
        return found.laplace_.summary()

    assert "22 validation inputs" in summary() and "198 inputs" in summary()
    assert "validation inputs" not in summary(validation_fraction=None)
    assert "validation inputs" not in summary(count=190)
    assert "validation inputs" not in summary(prior_precision=1.0)
    lonely = np.where(np.arange(220) == 7, 2, labels)  # a class with a single member cannot be in both parts
    assert "validation inputs" not in summary(classes=lonely)


def test_warnings_name_the_parameter_of_the_estimator():
    inputs = np.linspace(-1, 1, 40)[:, None]
    with pytest.warns(UserWarning, match="[Vv]alidation data.*validation_fraction=0.1") as caught:
        SubspaceLaplaceClassifier(max_iter=1, random_state=0).fit(inputs, np.arange(40) % 2)
    assert [warning.filename for warning in caught] == [__file__]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_the_dtype_of_the_inputs_is_kept(dtype, iris, diabetes):
    classifier = SubspaceLaplaceClassifier(max_iter=5).fit(iris[0].astype(dtype), iris[1])
    assert classifier.predict_proba(iris[0]).dtype == dtype
    regressor = SubspaceLaplaceRegressor(max_iter=5).fit(diabetes[0].astype(dtype), diabetes[1])
    assert all(part.dtype == dtype for part in regressor.predict(diabetes[0], return_std=True))


def test_the_units_of_inputs_and_targets_do_not_matter(diabetes):
    inputs, targets = diabetes
    mean, std = SubspaceLaplaceRegressor(max_iter=20, random_state=0).fit(*diabetes).predict(inputs, return_std=True)
    other = SubspaceLaplaceRegressor(max_iter=20, random_state=0).fit(1000 * inputs + 3, targets / 7 - 2)
    other_mean, other_std = other.predict(1000 * inputs + 3, return_std=True)
    np.testing.assert_allclose(7 * (other_mean + 2), mean, rtol=1e-6)
    np.testing.assert_allclose(7 * other_std, std, rtol=1e-6)


def test_neither_random_state_nor_data_of_the_caller_is_touched(iris):
    inputs, labels = iris[0].copy(), iris[1].copy()
    before = torch.random.get_rng_state(), np.random.get_state()[1].copy()
    first, second = (SubspaceLaplaceClassifier(max_iter=5, random_state=3).fit(inputs, labels) for _ in range(2))
    assert torch.equal(torch.random.get_rng_state(), before[0])
    np.testing.assert_array_equal(np.random.get_state()[1], before[1])
    np.testing.assert_array_equal(first.predict_proba(inputs), second.predict_proba(inputs))
    np.testing.assert_array_equal(inputs, iris[0])


def test_labels_may_be_words_and_come_back(iris):
    words = load_iris().target_names[iris[1]]
    classifier = SubspaceLaplaceClassifier(random_state=0, max_iter=50).fit(iris[0], words)
    assert list(classifier.classes_) == ["setosa", "versicolor", "virginica"]
    assert classifier.score(iris[0], words) > 0.9


def test_grid_search_over_prior_and_dimension_in_a_pipeline(diabetes):
    inputs, targets = diabetes[0][:120, :3], diabetes[1][:120]
    pipeline = make_pipeline(PolynomialFeatures(2), SubspaceLaplaceRegressor(max_iter=10, random_state=0))
    grid = {"subspacelaplaceregressor__prior_precision": [0.1, 10.0], "subspacelaplaceregressor__dim": [2, 20]}
    search = GridSearchCV(pipeline, grid, scoring=log_predictive_density, cv=2).fit(inputs, targets)
    scores = search.cv_results_["mean_test_score"]
    assert len(set(scores)) == 4  # both matter
    assert search.best_score_ == scores.max()
    mean, std = search.predict(inputs), search.best_estimator_.predict(inputs, return_std=True)[1]
    density = torch.distributions.Normal(torch.tensor(mean), torch.tensor(std)).log_prob(torch.tensor(targets))
    assert search.score(inputs, targets) == pytest.approx(density.mean().item())


@pytest.mark.parametrize(("projector", "complement"), [("lowrank-kfac", "kfac"), ("full", None)])
def test_pickled_estimators_predict_the_same(projector, complement, iris, diabetes):
    options = {**sized(projector, 5), "complement": complement, "max_iter": 5, "random_state": 0}
    classifier = SubspaceLaplaceClassifier(**options).fit(*iris)
    again = pickle.loads(pickle.dumps(classifier))
    np.testing.assert_allclose(again.predict_proba(iris[0]), classifier.predict_proba(iris[0]), rtol=1e-12)
    regressor = SubspaceLaplaceRegressor(**options).fit(*diabetes)
    again = pickle.loads(pickle.dumps(regressor))
    for found, expected in zip(
        again.predict(diabetes[0], return_std=True), regressor.predict(diabetes[0], return_std=True), strict=True
    ):
        np.testing.assert_allclose(found, expected, rtol=1e-12)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"activation": "sine"}, "Unknown activation 'sine'; choose one of tanh"),
        ({"hidden_layer_sizes": (5, 0)}, "hidden_layer_sizes must be a positive integer"),
        ({"max_iter": 0}, "max_iter must be a positive integer"),
        ({"batch_size": 1.5}, "batch_size must be a positive integer"),
        ({"learning_rate": -1.0}, "learning_rate must be positive"),
        ({"prior_precision": "best"}, "Unknown prior_precision 'best'"),
        ({"prior_precision": "marglik"}, "Unknown prior_precision 'marglik'; pass a positive number, 'auto' or"),
        ({"validation_fraction": 1.0}, r"must be a float in the range \(0.0, 1.0\), 'auto' or None. Got 1.0"),
        ({"validation_fraction": 0}, r"The 'validation_fraction' parameter of SubspaceLaplace.* Got 0 instead"),
        ({"validation_fraction": "half"}, "Got 'half' instead"),
        ({"validation_fraction": float("nan")}, "Got nan instead"),
        ({"validation_fraction": 0.2, "prior_precision": 1.0}, "no effect with prior_precision=1.0"),
        ({"validation_fraction": 0.2, "prior_precision": "evidence"}, "no effect with prior_precision='evidence'"),
        ({"projector": "full", "dim": 5}, "dim has no effect: projector='full' has its own"),
        ({"projector": None, "dim": 5}, "dim has no effect: projector=None has no subspace"),
        ({"projector": None, "complement": None}, "projector=None leaves no uncertainty"),
        ({"projector": "best"}, "Unknown projector 'best'"),
        ({"complement": "full"}, "Unknown complement 'full'"),
    ],
)
@pytest.mark.parametrize("estimator", BOTH)
def test_bad_parameters_are_refused_when_fitting_not_before(estimator, options, message, iris):
    made = estimator(**options)
    with pytest.raises(ValueError, match=message):
        made.fit(*iris)


def test_one_class_is_no_classification():
    with pytest.raises(ValueError, match="y holds one class, 7"):
        SubspaceLaplaceClassifier().fit(np.eye(3), np.array([7, 7, 7]))


def test_without_scikit_learn_the_error_says_what_to_install():
    code = "import sys; sys.modules |= dict.fromkeys(['sklearn', 'transformers', 'lightning', 'botorch'])\n"
    code += "import sublaplace; import sublaplace.sklearn"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "ImportError: sublaplace.sklearn needs scikit-learn" in run.stderr
    assert "sublaplace[sklearn]" in run.stderr
