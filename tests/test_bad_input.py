"""Bad input gets an error that says what is wrong and what to do, and the model is as it was before."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from networks import InfiniteSlope
from sensitive import batches, data, fitted, refused, sensitive, untouched
from test_laplace import loader, sized
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from sublaplace import PROJECTORS, Categorical, Drawn, Gaussian, Resources, SubspaceLaplace


def regression_batches(n=8, outputs=3):
    x, _ = data(n)
    return loader(x, torch.randn(n, outputs, generator=torch.Generator().manual_seed(2), dtype=torch.float64))


# Settings -------------------------------------------------------------------------------------------------------------

SETTINGS = {
    "a prior precision of zero": ({"prior_precision": 0.0}, ValueError, ["prior_precision", "positive"]),
    "a negative prior precision": ({"prior_precision": -1}, ValueError, ["prior_precision", "positive", "-1"]),
    "an infinite prior precision": ({"prior_precision": math.inf}, ValueError, ["prior_precision", "finite"]),
    "a prior precision that is NaN": ({"prior_precision": math.nan}, ValueError, ["prior_precision", "finite", "nan"]),
    "no prior precision": ({"prior_precision": None}, (TypeError, ValueError), ["prior_precision", "positive"]),
    "several prior precisions": (
        {"prior_precision": torch.ones(2)},
        (TypeError, ValueError),
        ["prior_precision", "positive number"],
    ),
    "an unknown prior precision": (
        {"prior_precision": "empirical"},
        ValueError,
        ["prior_precision", "empirical", "positive number", "'auto'", "'evidence'"],
    ),
    "a negative dim": ({"dim": -3}, ValueError, ["dim", "negative", "-3"]),
    "a dim of zero": ({"dim": 0}, ValueError, ["dim=0", "at least 1"]),
    "a fractional dim": ({"dim": 2.5}, TypeError, ["dim", "integer", "2.5"]),
    "a whole float as dim": ({"dim": 4.0}, TypeError, ["dim", "integer"]),
    "a boolean dim": ({"dim": True}, TypeError, ["dim", "integer", "True"]),
    "a dim that is a word": ({"dim": "many"}, TypeError, ["dim", "integer", "Captured", "many"]),
    "an unknown projector": (
        {"projector": "low-rank-kfac"},
        ValueError,
        ["low-rank-kfac", *PROJECTORS, "full"],
    ),
    "a projector that is no function": ({"projector": 3}, TypeError, ["projector", "name", "function"]),
    "an unknown likelihood": (
        {"likelihood": "poisson"},
        ValueError,
        ["poisson", "classification", "regression"],
    ),
    "no likelihood": ({"likelihood": None}, (TypeError, ValueError), ["likelihood", "classification", "regression"]),
    "a loss as likelihood": (
        {"likelihood": nn.CrossEntropyLoss()},
        (TypeError, ValueError),
        ["CrossEntropyLoss", "classification", "regression"],
    ),
    "a likelihood's class": ({"likelihood": Gaussian}, TypeError, ["likelihood object", "Gaussian(0.1)"]),
    "no subspace inputs to draw": ({"subspace_inputs": Drawn(0)}, ValueError, ["count", "positive"]),
    "a fractional number of subspace inputs": (
        {"subspace_inputs": Drawn(2.5)},
        (TypeError, ValueError),
        ["count", "integer"],
    ),
    "no seed": ({"seed": None}, (TypeError, ValueError), ["seed must be an integer"]),
    "resources in a mapping": ({"resources": {"memory_budget": 10}}, TypeError, ["resources must be Resources"]),
    "an argument that does not exist": ({"dimension": 3}, TypeError, ["no argument 'dimension'"]),
}


@pytest.mark.parametrize(("options", "exception", "words"), SETTINGS.values(), ids=SETTINGS.keys())
def test_a_setting_without_meaning_is_refused(options, exception, words):
    model = sensitive()
    options = {"likelihood": "classification", **options}
    with refused(model, exception, *words):
        SubspaceLaplace(model, **options)


PARTS = {
    "noise of zero": (lambda: Gaussian(0.0), ValueError, ["noise_std", "positive"]),
    "negative noise": (lambda: Gaussian(-0.1), ValueError, ["noise_std", "positive"]),
    "noise that is NaN": (lambda: Gaussian(math.nan), ValueError, ["noise_std", "finite"]),
    "negative noise of one output": (lambda: Gaussian([0.1, -0.1]), ValueError, ["noise_std", "positive"]),
    "noise of no output": (lambda: Gaussian([]), ValueError, ["noise_std", "one for each output"]),
    "an unknown estimate of the noise": (
        lambda: Gaussian("per-input"),
        ValueError,
        ["per-input", "'per-output'", "number"],
    ),
    "noise that is no number": (lambda: Gaussian(object()), TypeError, ["noise_std", "positive number"]),
    "a direction tolerance above one": (
        lambda: Resources(direction_tolerance=2.0),
        ValueError,
        ["direction_tolerance", "[0, 1)"],
    ),
    "a direction tolerance that is no number": (
        lambda: Resources(direction_tolerance="a"),
        (TypeError, ValueError),
        ["direction_tolerance", "must be a number"],
    ),
    "a negative memory budget": (lambda: Resources(memory_budget=-1), ValueError, ["memory_budget", "positive"]),
    "a fractional memory budget": (lambda: Resources(memory_budget=1e6), ValueError, ["memory_budget", "integer"]),
    "a scratch folder that does not exist": (
        lambda: Resources(scratch_folder="no/such/folder"),
        ValueError,
        ["scratch_folder", "no/such/folder", "create it"],
    ),
}


@pytest.mark.parametrize(("build", "exception", "words"), PARTS.values(), ids=PARTS.keys())
def test_a_part_of_the_settings_without_meaning_is_refused_when_it_is_made(build, exception, words):
    with refused(sensitive(), exception, *words):
        build()


FORMER_ARGUMENTS = {
    "noise_std": (0.1, TypeError, ["'noise_std'", "Gaussian(0.1)", "Gaussian('per-output')"]),
    "sigma_noise": (0.1, TypeError, ["'sigma_noise'", "Gaussian(0.1)", "Gaussian('per-output')"]),
    "num_subspace_inputs": (20, TypeError, ["'num_subspace_inputs'", "subspace_inputs=Drawn("]),
    "perturbation": (0.1, TypeError, ["'perturbation'", "subspace_inputs=Perturbed("]),
    "complement_weight": (1.0, TypeError, ["'complement_weight'", "Complement('kfac', weight=1.0)"]),
    "captured": (0.5, TypeError, ["'captured'", "dim=Captured("]),
    "max_dim": (30, TypeError, ["'max_dim'", "dim=Captured("]),
    "certified": (True, TypeError, ["'certified'", "fit(train_loader, certify=True)"]),
    "memory_budget": (10**6, TypeError, ["'memory_budget'", "Resources(memory_budget="]),
    "scratch_folder": ("/tmp", TypeError, ["'scratch_folder'", "Resources(scratch_folder="]),
    "direction_tolerance": (0.0, TypeError, ["'direction_tolerance'", "Resources(direction_tolerance="]),
    "prior_precision": ("marglik", ValueError, ["prior_precision='evidence'"]),
    "dim": ("auto", ValueError, ["dim=Captured("]),
    "subspace_inputs": ("perturbed", ValueError, ["Perturbed("]),
}


@pytest.mark.parametrize(
    "likelihood", ["classification", "regression", Gaussian(0.5)], ids=["classification", "regression", "an object"]
)
@pytest.mark.parametrize("name", FORMER_ARGUMENTS)
def test_a_former_spelling_of_an_argument_is_refused_with_the_new_one(name, likelihood):
    model = sensitive()
    value, exception, words = FORMER_ARGUMENTS[name]
    for make in (SubspaceLaplace, SubspaceLaplace.paper):
        with refused(model, exception, *words):
            make(model, likelihood, **{name: value})


FORMER_MEMBERS = {
    "truncate": "truncated(",
    "update": "updated(",
    "captured": "captured_share(",
    "trace": "leading_traces(",
    "projection": "projection_matrix(",
}


@pytest.mark.parametrize("name", FORMER_MEMBERS)
def test_a_former_name_of_a_member_is_refused_with_the_new_one(name):
    model = sensitive()
    for la in (SubspaceLaplace.paper(model, "classification", dim=4), fitted(model)):
        with refused(model, AttributeError, f"'{name}'", FORMER_MEMBERS[name]):
            getattr(la, name)
        assert not hasattr(la, name)
        assert hasattr(type(la), FORMER_MEMBERS[name].rstrip("("))


def test_a_member_that_never_was_is_an_attribute_error():
    with refused(sensitive(), AttributeError, "SubspaceLaplace", "'posterior_mean'"):
        _ = fitted().posterior_mean


def test_without_a_dim_there_are_a_hundred_dimensions():
    x = torch.randn(60, 20, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    model = nn.Sequential(nn.Linear(20, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    for options in ({}, {"dim": None}):
        la = SubspaceLaplace.paper(model, "classification", **options).fit([(x, torch.arange(60) % 3)])
        assert la.dim == 100


@pytest.mark.parametrize("model", [None, torch.nn.functional.relu, "resnet"], ids=lambda model: type(model).__name__)
def test_a_model_that_is_no_module_is_refused(model):
    with pytest.raises(TypeError, match=r"torch\.nn\.Module"):
        SubspaceLaplace.paper(model, "classification")


def test_an_integer_of_numpy_is_an_integer():
    assert SubspaceLaplace.paper(sensitive(), "classification", dim=np.int64(4)).fit(batches()).dim == 4


def test_the_noise_of_a_likelihood_object_is_kept():
    la = SubspaceLaplace.paper(sensitive(), Gaussian(0.5), dim=4).fit(regression_batches())
    assert la.noise_std == 0.5


def test_a_likelihood_object_and_its_name_give_the_same_posterior():
    model = sensitive()
    x = data()[0]
    la = SubspaceLaplace.paper(model, Categorical(link="probit"), dim=4).fit(batches())
    assert torch.equal(la(x), fitted(model)(x))


# Models ---------------------------------------------------------------------------------------------------------------


def test_a_model_without_parameters_that_require_grad_is_refused():
    model = sensitive().requires_grad_(False)
    with refused(model, ValueError, "no parameter that requires grad", "requires_grad=True"):
        SubspaceLaplace.paper(model, "classification")


def test_parameters_of_several_dtypes_are_refused():
    model = sensitive()
    model.head.float()
    with refused(model, ValueError, "dtypes", "float32", "float64", "convert"):
        SubspaceLaplace.paper(model, "classification")


def test_parameters_on_several_devices_are_refused():
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2, device="meta"))
    with pytest.raises(ValueError, match=r"several devices \(cpu, meta\); move them to one"):
        SubspaceLaplace.paper(model, "classification")


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_parameter_that_is_not_finite_is_named(value):
    model = sensitive()
    with torch.no_grad():
        model.second.weight[1, 2] = value
    with refused(model, ValueError, "second.weight", "NaN or infinity"):
        SubspaceLaplace.paper(model, "classification")


def test_a_parameter_that_stopped_to_be_finite_before_the_fit_is_named():
    model = sensitive()
    la = SubspaceLaplace.paper(model, "classification")
    with torch.no_grad():
        model.second.bias[1] = math.nan
    with refused(model, ValueError, "second.bias", "NaN or infinity"):
        la.fit(batches())


def test_a_frozen_parameter_that_is_not_finite_is_named():
    model = sensitive()
    with torch.no_grad():
        model.first.weight[0, 0] = math.nan
    assert not model.first.weight.requires_grad
    with refused(model, ValueError, "first.weight", "NaN or infinity"):
        SubspaceLaplace.paper(model, "classification", dim=4).fit(batches())


class Shaped(nn.Module):
    """A linear map whose result is then changed by a function."""

    def __init__(self, change, outputs=3):
        super().__init__()
        self.inner = nn.Linear(3, 4, dtype=torch.float64)
        self.linear = nn.Linear(4, outputs, dtype=torch.float64)
        self.change = change

    def forward(self, x):
        return self.change(self.linear(self.inner(x)))


def shaped(change, outputs=3):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Shaped(change, outputs)


WRONG_OUTPUTS = {
    "one dimension": (lambda y: y[:, 0], "(3,)"),
    "three dimensions": (lambda y: y[:, :, None], "(3, 3, 1)"),
    "a mean over the batch": (lambda y: y.mean(0, keepdim=True), "(1, 3)"),
    "a tuple": (lambda y: (y, y), "tuple"),
    "nothing": (lambda y: None, "NoneType"),
}


@pytest.mark.parametrize(("change", "shape"), WRONG_OUTPUTS.values(), ids=WRONG_OUTPUTS.keys())
def test_outputs_that_are_not_a_matrix_are_refused_with_their_shape(change, shape):
    model = shaped(change)
    with refused(model, ValueError, "(3, C)", shape, "wrap"):
        SubspaceLaplace.paper(model, "classification", dim=4).fit(batches())


def test_a_scalar_output_for_a_single_input_is_refused():
    model = shaped(lambda y: y.squeeze(), outputs=1)
    x, _ = data()
    with refused(model, ValueError, "C)", "wrap"):
        SubspaceLaplace.paper(model, "regression", dim=4).fit([(x, x[:, :1])])


class BatchStatistics(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 4)
        self.norm = nn.BatchNorm1d(4, track_running_stats=False)
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        return self.head(self.norm(self.linear(x)))


class RecurrentOverTheBatch(nn.Module):
    """The classic mistake: `batch_first` forgotten, so that the recurrence runs over the batch."""

    def __init__(self):
        super().__init__()
        self.cell = nn.LSTM(3, 4)
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        return self.head(self.cell(x[:, None].expand(-1, 2, -1))[0][:, -1])


MIXING = {
    "batch statistics": BatchStatistics,
    "a mean over the batch": lambda: shaped(lambda y: y - y.mean(0)),
    "attention over the batch": lambda: shaped(lambda y: (y @ y.T).softmax(1) @ y),
    "the next input": lambda: shaped(lambda y: y + y.roll(-1, 0)),
    "the previous input": lambda: shaped(lambda y: y + F.pad(y, (0, 0, 1, 0))[:-1]),
    "a sum over the inputs so far": lambda: shaped(lambda y: y.cumsum(0)),
    "a recurrence over the batch": RecurrentOverTheBatch,
}


@pytest.mark.parametrize("build", MIXING.values(), ids=MIXING.keys())
def test_outputs_that_depend_on_other_inputs_of_the_batch_are_refused(build):
    model = build().double()
    with refused(model, ValueError, "depend on the other inputs of its batch"):
        SubspaceLaplace.paper(model, "classification", dim=4).fit(batches(size=4))


def test_randomness_that_eval_mode_does_not_switch_off_is_refused():
    model = shaped(lambda y: F.dropout(y, 0.5, training=True))
    with refused(model, (ValueError, RuntimeError), "random"):
        SubspaceLaplace.paper(model, "classification", dim=4).fit(batches())


def test_a_layer_whose_activations_overflow_is_named():
    model = sensitive()
    with torch.no_grad():
        model.norm.bias.fill_(10.0)  # so that tanh is near one
        model.second.weight.fill_(1e308)
    with refused(model, ValueError, "second.weight", "NaN or infinity"):
        SubspaceLaplace.paper(model, "classification", dim=4).fit(batches())


def test_nan_from_a_function_without_parameters_is_traced_to_the_next_layer():
    model = shaped(torch.log)
    with refused(model, ValueError, "outputs", "NaN or infinity"):
        SubspaceLaplace.paper(model, "classification", dim=4).fit(batches())


@pytest.mark.parametrize("projector", ["lowrank-kfac", "lowrank-diagonal", "subset-magnitude", "last-layer", "full"])
def test_derivatives_that_are_not_finite_are_refused_with_the_parameter(projector):
    torch.manual_seed(0)
    model = InfiniteSlope().double()
    with refused(model, ValueError, "inner.", "Jacobian", "NaN or infinity"):
        SubspaceLaplace.paper(model, "classification", **sized(projector, 4)).fit(batches())


def test_derivatives_that_stop_to_be_finite_in_a_later_batch_are_refused():
    torch.manual_seed(0)
    model = InfiniteSlope().double()
    with torch.no_grad():
        model.inner.weight.copy_(torch.eye(4, 3))
        model.inner.bias.fill_(0.1)
    x, y = data()
    with refused(model, ValueError, "inner.", "Jacobian", "NaN or infinity"):
        SubspaceLaplace.paper(model, "classification", dim=4).fit([(x.abs(), y), (-x.abs() - 1, y)])


def test_last_layer_of_a_network_with_a_frozen_last_layer_is_refused():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3)).double()
    model[2].requires_grad_(False)
    with refused(model, ValueError, "last-layer", "require grad"):
        SubspaceLaplace.paper(model, "classification", projector="last-layer").fit(batches())


class Bounded(nn.Module):
    """Infinite inputs leave its outputs finite."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 3)

    def forward(self, x):
        return self.last(self.first(x).tanh())


def test_a_parameter_without_elements_does_no_harm():
    class Odd(Bounded):
        def __init__(self):
            super().__init__()
            self.nothing = nn.Parameter(torch.zeros(0))

    model, inputs = Odd(), torch.randn(8, 3)
    la = SubspaceLaplace.paper(model, "classification", dim=2).fit([(inputs, torch.arange(8) % 3)])
    assert torch.isfinite(la(inputs)).all()


# Data -----------------------------------------------------------------------------------------------------------------


X, Y = data()
WRONG_DATA = {
    "a label above the classes": ("classification", [(X, Y), (X, Y + 1)], ["labels", "0 … 2", "3"]),
    "a negative label": ("classification", [(X, Y - 1)], ["labels", "0 … 2", "-1"]),
    "float labels": ("classification", [(X, Y.double())], ["integer", "float64"]),
    "one-hot labels": ("classification", [(X, F.one_hot(Y, 3))], ["shape (n,)", "(8, 3)"]),
    "a column of labels": ("classification", [(X, Y[:, None])], ["shape (n,)", "(8, 1)"]),
    "too few labels": ("classification", [(X, Y[:5])], ["5 labels", "8 inputs"]),
    "integer targets": ("regression", [(X, torch.ones(8, 3).long())], ["floating-point", "int64"]),
    "a vector of targets": ("regression", [(X, X[:, 0])], ["(8,)", "(8, 3)"]),
    "too few outputs in the targets": ("regression", [(X, X[:, :1])], ["(8, 1)", "(8, 3)"]),
    "too few targets": ("regression", [(X, X[:4])], ["(4, 3)", "(8, 3)"]),
    "targets that are NaN": ("regression", [(X, X * math.nan)], ["targets", "NaN or infinity"]),
    "inputs that are NaN": ("classification", [(X * math.nan, Y)], ["inputs", "NaN or infinity"]),
    "inputs that are infinite": ("classification", [(X + math.inf, Y)], ["inputs", "NaN or infinity"]),
    "inputs that are NaN in a later batch": ("classification", [(X, Y), (X * math.nan, Y)], ["inputs", "NaN"]),
    "an empty list": ("classification", [], ["empty"]),
    "batches without inputs": ("classification", [(X[:0], Y[:0])], ["empty"]),
    "batches without targets": ("classification", [X], ["pair", "(inputs, targets)"]),
    "batches of three": ("classification", [(X, Y, Y)], ["pair", "(inputs, targets)", "weights"]),
    "batches of four": ("classification", [(X, Y, Y, Y)], ["pair", "(inputs, targets)"]),
    "negative weights": ("classification", [(X, Y, -torch.ones(8))], ["weights", "negative"]),
    "weights that are NaN": ("classification", [(X, Y, torch.full((8,), math.nan))], ["weights", "finite"]),
    "too few weights": ("classification", [(X, Y, torch.ones(7))], ["weights", "(8,)", "(7,)"]),
    "weights that are all zero": ("classification", [(X, Y, torch.zeros(8))], ["No training input counts"]),
    "targets in a list": ("classification", [(X, list(range(8)))], ["list", "torch.as_tensor"]),
    "a mapping without labels": ("classification", [{"x": X, "y": Y}], ["labels", "['x', 'y']"]),
    "inputs and targets without a loader": ("classification", (X, Y), ["(inputs, targets)"]),
    "residuals of zero": ("regression", "the outputs themselves", ["residuals", "zero", "Gaussian(0.1)"]),
    "residuals of rounding": ("regression", "the outputs with rounding", ["residuals", "rounding", "Gaussian(0.1)"]),
}


@pytest.mark.parametrize(("likelihood", "given", "words"), WRONG_DATA.values(), ids=WRONG_DATA.keys())
def test_data_that_do_not_fit_are_refused(likelihood, given, words):
    model = sensitive()
    if isinstance(given, str):
        with torch.no_grad():
            model.head.weight.zero_()
            targets = model.head.bias.expand(8, 3).detach()
            given = [(X, targets if given == "the outputs themselves" else targets.nextafter(targets + 1))]
    la = SubspaceLaplace.paper(model, likelihood, dim=4)
    with refused(model, ValueError, *words):
        la.fit(given)
    with pytest.raises(RuntimeError, match="not fitted"):
        la(X)


def test_equal_residuals_are_noise_of_their_size():
    """σ is the root mean square of the residuals, about zero: those that are all −1 are no perfect fit."""
    model = sensitive()
    with torch.no_grad():
        model.head.weight.zero_()
    targets = model.head.bias.expand(8, 3).detach() - 1
    assert SubspaceLaplace.paper(model, "regression", dim=4).fit([(X, targets)]).noise_std == pytest.approx(1)


def test_a_batch_without_inputs_between_others_changes_nothing():
    model = sensitive()
    with_empty = SubspaceLaplace.paper(model, "classification", dim=4).fit([(X, Y), (X[:0], Y[:0])])
    assert torch.equal(with_empty(X), SubspaceLaplace.paper(model, "classification", dim=4).fit([(X, Y)])(X))


def test_a_classifier_with_one_output_is_told_to_have_two():
    model = sensitive(outputs=1)
    for targets in (Y % 2, Y * 0):
        with refused(model, ValueError, "two outputs"):
            SubspaceLaplace.paper(model, "classification", dim=4).fit([(X, targets)])


NO_LOADERS = {
    "a tensor": (X, TypeError, ["loader", "DataLoader"]),
    "a dataset": (TensorDataset(X, Y), TypeError, ["loader", "DataLoader"]),
    "a number": (3, TypeError, ["iterable", "(inputs, targets)"]),
    "nothing": (None, TypeError, ["iterable", "(inputs, targets)"]),
}


@pytest.mark.parametrize(("given", "exception", "words"), NO_LOADERS.values(), ids=NO_LOADERS.keys())
def test_what_is_no_loader_is_refused(given, exception, words):
    model = sensitive()
    with refused(model, exception, *words):
        SubspaceLaplace.paper(model, "classification", dim=4).fit(given)


class Stream(IterableDataset):
    """A dataset that holds a generator, which is used up after one pass."""

    def __init__(self):
        self.items = zip(X, Y, strict=True)

    def __iter__(self):
        return self.items


class HiddenIterator:
    def __init__(self):
        self.batches = iter(batches())

    def __iter__(self):
        return self.batches


ONE_SHOT = {
    "a generator": lambda: (batch for batch in batches()),
    "an iterator of a list": lambda: iter(batches()),
    "a zip": lambda: zip([X], [Y], strict=True),
    "an iterator of a DataLoader": lambda: iter(DataLoader(TensorDataset(X, Y), batch_size=3)),
    "an object that hides an iterator": HiddenIterator,
    "a DataLoader of a stream": lambda: DataLoader(Stream(), batch_size=3),
}


@pytest.mark.parametrize("projector", ["lowrank-kfac", "subset-magnitude", "full"])
@pytest.mark.parametrize("build", ONE_SHOT.values(), ids=ONE_SHOT.keys())
def test_an_iterator_that_can_be_read_only_once_is_refused(build, projector):
    model = sensitive()
    with refused(model, ValueError, "one-shot", "several times", "DataLoader"):
        SubspaceLaplace.paper(model, "classification", **sized(projector, 4)).fit(build())


def test_a_data_loader_with_shuffling_is_welcome():
    generator = torch.Generator().manual_seed(0)
    shuffled = DataLoader(TensorDataset(X, Y), batch_size=3, shuffle=True, generator=generator)
    found = SubspaceLaplace.paper(sensitive(), "classification", dim=4).fit(shuffled)(X)
    assert torch.allclose(found, fitted()(X), rtol=1e-8)


NO_INPUTS = {"an empty list": [], "an empty tensor": X[:0]}


@pytest.mark.parametrize("given", NO_INPUTS.values(), ids=NO_INPUTS.keys())
def test_a_subspace_from_no_inputs_is_refused(given):
    model = sensitive()
    with refused(model, ValueError, "subspace_inputs", "empty"):
        SubspaceLaplace.paper(model, "classification", dim=4, subspace_inputs=given).fit(batches())


def test_subspace_inputs_that_are_not_finite_are_refused():
    model = sensitive()
    with refused(model, ValueError, "inputs", "NaN or infinity"):
        SubspaceLaplace.paper(model, "classification", dim=4, subspace_inputs=X * math.nan).fit(batches())


@pytest.mark.parametrize("where", ["first batch", "later batch", "prediction"])
def test_infinite_inputs_are_named_though_outputs_are_finite(where):
    model, inputs = Bounded(), torch.randn(8, 3)
    data = [(inputs[:4], torch.arange(4) % 3), (inputs[4:].clone(), torch.arange(4) % 3)]
    la = SubspaceLaplace.paper(model, "classification", dim=2)
    if where == "prediction":
        la.fit(data)
        with refused(model, ValueError, "inputs hold NaN or infinity"):
            la(torch.tensor([[1.0, torch.inf, 0.0]]))
        return
    data[where == "later batch"][0][1, 1] = torch.inf
    with refused(model, ValueError, "inputs hold NaN or infinity"):
        la.fit(data)


# Memory ---------------------------------------------------------------------------------------------------------------


def test_a_projection_that_does_not_fit_into_memory_is_refused_before_it_is_made(monkeypatch):
    model = sensitive()
    la = SubspaceLaplace.paper(model, "classification", dim=40)
    monkeypatch.setattr("sublaplace.runtime.memory.available_bytes", lambda device: 1000)
    with refused(model, MemoryError, "projection", "KiB", "1000 B", "dim", "subset"):
        la.fit(batches())


def test_an_exact_posterior_that_does_not_fit_into_memory_is_refused_before_it_is_made(monkeypatch):
    model = sensitive()
    la = SubspaceLaplace.paper(model, "classification", projector="full")
    monkeypatch.setattr("sublaplace.runtime.memory.available_bytes", lambda device: 4000)
    with refused(model, MemoryError, "exact", "KiB", "3.9 KiB", "lowrank-kfac", "full_covariance"):
        la.fit(batches())


def test_the_matrix_of_a_subset_that_does_not_fit_into_memory_is_refused(monkeypatch):
    model = sensitive()
    la = SubspaceLaplace.paper(model, "classification", projector="subset-magnitude", dim=20).fit(batches())
    monkeypatch.setattr("sublaplace.runtime.memory.available_bytes", lambda device: 10_000)
    with refused(model, MemoryError, "projection", "truncate"):
        _ = la.projection_matrix()
    assert la.truncated(1).projection_matrix().shape == (la.num_parameters, 1)


TOO_LARGE = {
    "the covariance of the subspace inputs": (lambda la: la.fit(batches()), 30_000, ["subspace inputs", "24 outputs"]),
    "a joint covariance": (lambda la: la.functional_covariance(X, joint=True), 9_000, ["24 outputs", "joint=False"]),
    "covariances": (lambda la: la.functional_covariance(X), 500, ["3 outputs for 8 inputs", "functional_variance"]),
    "covariances of a prediction": (
        lambda la: la.predict(X).covariance,
        500,
        ["3 outputs for 8 inputs", "functional_variance"],
    ),
    "predictions from draws": (
        lambda la: la.predict(X, "mc"),
        500,
        ["3 outputs for 8 inputs", "functional_variance"],
    ),
    "samples": (lambda la: la.sample(50), 20_000, ["50 draws of", "fewer"]),
    "functional samples": (lambda la: la.functional_samples(X, 50), 20_000, ["50 draws of", "fewer"]),
}


@pytest.mark.parametrize("what", TOO_LARGE)
def test_what_does_not_fit_into_memory_is_refused_before_it_is_made(what, monkeypatch):
    model = sensitive()
    la = fitted(model)
    call, free, words = TOO_LARGE[what]
    monkeypatch.setattr("sublaplace.runtime.memory.available_bytes", lambda device: free)
    if what == "the covariance of the subspace inputs":
        monkeypatch.setattr(
            "sublaplace.fitting.steps.require", lambda *_: None
        )  # the projection would be refused first
        free = 10_000
        monkeypatch.setattr("sublaplace.runtime.memory.available_bytes", lambda device: free)
        monkeypatch.setattr("sublaplace.curvature.kfac.require", lambda *_: None)
    with refused(model, MemoryError, *words):
        call(la)
    monkeypatch.setattr("sublaplace.runtime.memory.available_bytes", lambda device: 10**9)
    call(la)


def test_probabilities_by_probit_do_not_need_the_memory_of_covariances(monkeypatch):
    la = fitted()
    expected = la(X)
    monkeypatch.setattr("sublaplace.runtime.memory.available_bytes", lambda device: 500)
    assert torch.equal(la(X), expected)
    prediction = la.predict(X)
    assert torch.equal(prediction.probabilities, expected)
    assert prediction.variance.shape == expected.shape


def test_kronecker_factors_that_do_not_fit_are_refused_with_the_parameter(monkeypatch):
    model = sensitive()
    monkeypatch.setattr("sublaplace.fitting.steps.require", lambda *_: None)
    monkeypatch.setattr("sublaplace.runtime.memory.available_bytes", lambda device: 300)
    with refused(model, MemoryError, "Kronecker factors of 'first.bias'", "lowrank-diagonal"):
        SubspaceLaplace.paper(model, "classification", dim=4).fit(batches())


# Use of a posterior ---------------------------------------------------------------------------------------------------

USES = {
    "call": lambda la: la(X),
    "predict": lambda la: la.predict(X),
    "functional_covariance": lambda la: la.functional_covariance(X),
    "joint functional_covariance": lambda la: la.functional_covariance(X, joint=True),
    "functional_variance": lambda la: la.functional_variance(X),
    "leading_traces": lambda la: la.leading_traces(X),
}
NO_DATA = {
    "projection_matrix": lambda la: la.projection_matrix(),
    "dim": lambda la: la.dim,
    "truncated": lambda la: la.truncated(2),
    "with_prior": lambda la: la.with_prior(2.0),
}


@pytest.mark.parametrize("use", (USES | NO_DATA).values(), ids=(USES | NO_DATA).keys())
def test_use_before_the_fit_is_refused(use):
    model = sensitive()
    with refused(model, RuntimeError, "not fitted", "fit(train_loader)"):
        use(SubspaceLaplace.paper(model, "classification", dim=4))


def optimizer_step(model):
    torch.optim.SGD(model.parameters(), lr=0.1).step()


def loaded_weights(model):
    model.load_state_dict({name: value + 1 for name, value in model.state_dict().items()})


def changed_data(model):
    model.head.weight.data.add_(1.0)


def replaced_data(model):
    model.head.weight.data = model.head.weight.data + 1.0


def replaced_layer(model):
    model.head = nn.Linear(5, 3, dtype=torch.float64)


def other_dtype(model):
    model.float()


def other_statistics(model):
    model.norm.running_mean += 1


CHANGES = [optimizer_step, loaded_weights, changed_data, replaced_data, replaced_layer, other_dtype, other_statistics]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__.replace("_", " "))
def test_a_model_that_has_changed_since_the_fit_is_refused(change):
    model = sensitive()
    la = fitted(model)
    change(model)
    x = X.to(model.head.weight.dtype)
    for use in (lambda: la(x), lambda: la.functional_variance(x), lambda: la.functional_covariance(x, joint=True)):
        with refused(model, RuntimeError, "changed since fit", "fit again"):
            use()


def test_what_does_not_change_the_function_may_change_after_the_fit():
    model = sensitive()
    la = fitted(model)
    expected = la(X)
    model.zero_grad()
    model.train()
    model.eval()
    model.requires_grad_(False)
    assert torch.equal(la(X), expected)
    model.requires_grad_(True)
    assert torch.equal(la(X), expected)
    assert la.num_parameters == 12 + 6 + 35 + 18


@pytest.mark.parametrize("link", ["softmax", ""])
def test_an_unknown_link_is_refused_with_those_that_exist(link):
    model = sensitive()
    la = fitted(model)
    with refused(model, ValueError, "link", "pairwise", "probit", "mc", "bridge"):
        la(X, link=link)


@pytest.mark.parametrize("use", USES.values(), ids=USES.keys())
def test_inputs_that_are_not_finite_are_refused_in_predictions(use, monkeypatch):
    model = sensitive()
    la = fitted(model)
    monkeypatch.setitem(globals(), "X", X * math.nan)
    with refused(model, ValueError, "inputs", "NaN or infinity"):
        use(la)


@pytest.mark.parametrize("given", NO_INPUTS.values(), ids=NO_INPUTS.keys())
@pytest.mark.parametrize("use", USES.values(), ids=USES.keys())
def test_predictions_for_no_inputs_are_refused(use, given, monkeypatch):
    model = sensitive()
    la = fitted(model)
    monkeypatch.setitem(globals(), "X", given)
    with refused(model, ValueError, "no inputs"):
        use(la)


@pytest.mark.parametrize("given", [None, 3, "pictures", np.zeros((4, 3))], ids=lambda given: type(given).__name__)
@pytest.mark.parametrize("use", USES.values(), ids=USES.keys())
def test_inputs_that_are_no_tensors_are_refused(use, given, monkeypatch):
    model = sensitive()
    la = fitted(model)
    monkeypatch.setitem(globals(), "X", given)
    with refused(model, TypeError, "must be a tensor", type(given).__name__):
        use(la)


def test_truncation_to_more_dimensions_than_there_are_is_refused():
    model = sensitive()
    la = fitted(model)
    with refused(model, ValueError, "truncate", "5", "4"):
        la.truncated(5)
    for dim in (0, -1, 2.0, True):
        with refused(model, (ValueError, TypeError), "dim must be a positive integer", str(dim)):
            la.truncated(dim)


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf, None])
def test_another_prior_without_meaning_is_refused(value):
    model = sensitive()
    la = fitted(model)
    with refused(model, (TypeError, ValueError), "prior_precision", "positive"):
        la.with_prior(value)


@pytest.mark.parametrize("use", ["projection_matrix", "truncated", "leading_traces"])
def test_the_full_posterior_has_no_subspace_and_says_so(use):
    model = sensitive()
    la = SubspaceLaplace.paper(model, "classification", projector="full").fit(batches())
    with refused(model, ValueError, "full", "no subspace"):
        (NO_DATA | USES)[use](la)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda la, x: la.predict(x, "mc", samples=0), ["samples must be a positive integer"]),
        (lambda la, x: la.full_covariance(x, tolerance=-1.0), ["tolerance must be positive"]),
        (lambda la, x: la.full_covariance(x, tolerance=float("nan")), ["tolerance must be positive"]),
        (lambda la, x: la.with_prior("marglik"), ["prior_precision must be one positive number"]),
        (lambda la, x: la.truncated(0), ["dim must be a positive integer", "0"]),
    ],
)
def test_bad_arguments_of_a_fitted_posterior(call, words):
    model, inputs = Bounded(), torch.randn(8, 3)
    la = SubspaceLaplace.paper(model, "classification", dim=2).fit([(inputs, torch.arange(8) % 3)])
    with refused(model, (ValueError, TypeError), *words):
        call(la, inputs)


# Warned about, then done ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("projector", ["lowrank-kfac", "lowrank-diagonal", "lowrank-isotropic", "lowrank-ggn"])
def test_a_dim_above_the_numerical_rank_is_lowered_with_a_warning_that_gives_the_rank(projector):
    model = sensitive()
    with untouched(model), pytest.warns(UserWarning, match=r"dim=20 .*numerical rank 6 .*dim=6 is used"):
        la = SubspaceLaplace.paper(model, "classification", projector=projector, dim=20, subspace_inputs=X[:2]).fit(
            batches()
        )
    assert la.dim == 6
    P = la.projection_matrix()
    assert P.shape == (la.num_parameters, 6)
    assert torch.allclose(P.T @ P, torch.eye(6).double(), atol=1e-12)


@pytest.mark.parametrize("projector", ["subset-magnitude", "subset-diagonal"])
def test_a_dim_above_the_number_of_parameters_is_lowered_with_a_warning(projector):
    model = sensitive()
    p = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    with untouched(model), pytest.warns(UserWarning, match=f"dim={p + 1} .*number of parameters.*dim={p}"):
        la = SubspaceLaplace.paper(model, "classification", projector=projector, dim=p + 1).fit(batches())
    assert la.dim == la.num_parameters == p


def test_a_network_whose_outputs_do_not_depend_on_its_parameters_is_refused():
    model = shaped(lambda y: 0 * y)
    with refused(model, ValueError, "do not depend", "Jacobian is zero"):
        SubspaceLaplace.paper(model, "classification", dim=4).fit(batches())


POSITIONS = {
    "positions before classes": lambda x: x[:, None, :].expand(-1, 5, -1),
    "positions in the batch": lambda x: x.repeat_interleave(5, dim=0),
    "pictures": lambda x: x[:, :, None, None].expand(-1, -1, 2, 2),
}


@pytest.mark.parametrize("name", POSITIONS)
def test_outputs_with_positions_are_refused_with_the_ways_to_go_on(name):
    class Positions(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 3)

        def forward(self, x):
            return POSITIONS[name](self.layer(x))

    model = Positions()
    data = [(torch.randn(8, 3), torch.arange(8) % 3)]
    with pytest.raises(
        ValueError, match=r"it returned \(.*Three ways to go on: .*class_dim=1.*one position.*of its own"
    ):
        SubspaceLaplace(model, "classification").fit(data)


def test_independent_outputs_at_positions_may_be_flattened():
    class Pictures(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Conv2d(1, 1, 3, padding=1)

        def forward(self, x):
            return self.layer(x).flatten(1)

    x = torch.randn(8, 1, 4, 4)
    la = SubspaceLaplace.paper(Pictures(), "multi-label", 4).fit([(x, (x > 0).float().flatten(1))])
    assert la.functional_variance(x).view(8, 4, 4).isfinite().all()
