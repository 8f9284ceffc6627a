"""After a fit, a model that is no longer the fitted one is refused; equal parameters in other tensors are found."""

import copy
import functools

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from networks import TiedWeights, make
from sensitive import untouched
from test_laplace import labels, loader
from torch import nn
from torch.nn.utils import parametrizations

from sublaplace import SubspaceLaplace
from sublaplace.model.fingerprint import Fingerprint
from sublaplace.runtime.files import SavedFileError


def fitted(name="mlp", dtype=torch.float64, **options):
    model, inputs = make(name, 12, dtype)
    la = SubspaceLaplace.paper(model, "classification", dim=4, **options).fit(loader(inputs, labels(model, inputs)))
    return la, model, inputs


def assigned_state(model):
    model.load_state_dict({key: value.clone() for key, value in model.state_dict().items()}, assign=True)


def copied_parameter(model):
    model[0].weight = nn.Parameter(model[0].weight.clone())


def copied_module(model):
    model[2] = copy.deepcopy(model[2])


@pytest.mark.parametrize("change", [assigned_state, copied_parameter, copied_module])
def test_equal_parameters_in_other_tensors_give_the_same_predictions(change):
    la, model, inputs = fitted()
    expected = la.functional_covariance(inputs), la.sample(3), la.functional_samples(inputs, 3)
    change(model)
    with untouched(model):
        found = la.functional_covariance(inputs), la.sample(3), la.functional_samples(inputs, 3)
    assert all(torch.allclose(a, b, rtol=1e-12) for a, b in zip(found, expected, strict=True))


def test_a_replaced_parameter_that_was_frozen_stays_outside_of_the_posterior():
    la, model, inputs = fitted("frozen-layer")
    expected = la.functional_covariance(inputs)
    model[0].weight = nn.Parameter(model[0].weight.clone())  # requires grad, unlike the one at the fit
    assert torch.allclose(la.functional_covariance(inputs), expected, rtol=1e-12)


def another_activation(model):
    model[1] = nn.Sigmoid()


def another_value_in_place(model):
    model[0].weight.data[0, 0] += 1e-9


def another_value_through_numpy(model):
    model[0].weight.detach().numpy()[1, 1] *= 1 + 1e-15


def exchanged_values(model):
    first, second = model[0].bias.tolist()[0], model[0].bias.tolist()[3]
    with torch.no_grad():
        model[0].bias[0], model[0].bias[3] = second, first


def exchanged_rows(model):
    with torch.no_grad():
        model[0].weight.copy_(model[0].weight.flip(0))


def parametrized(model):
    parametrizations.weight_norm(model[0])


def converted(model):
    model.float()


def longer(model):
    model.append(nn.Softmax(1))


CHANGES = [another_activation, another_value_in_place, another_value_through_numpy, exchanged_values, exchanged_rows]
CHANGES += [parametrized, converted, longer]


@pytest.mark.parametrize("change", CHANGES)
def test_a_model_that_is_another_function_is_refused(change):
    la, model, inputs = fitted()
    change(model)
    for call in (la, la.predict, la.functional_variance, lambda _: la.sample(2), lambda _: la.with_prior(2.0)):
        with pytest.raises(RuntimeError, match=r"changed since fit.*fit again"):
            call(inputs)


def test_the_message_names_a_module_that_was_exchanged():
    la, model, inputs = fitted()
    model[1] = nn.Sigmoid()
    with pytest.raises(RuntimeError, match=r"module '1' \(torch.nn.modules.activation.Tanh\(\) at the fit, .*Sigmoid"):
        la(inputs)


def test_an_exchanged_function_is_noticed():
    class Holding(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.head, self.act = nn.Linear(3, 4), nn.Linear(4, 3), F.relu

        def forward(self, x):
            return self.head(self.act(self.inner(x)))

    torch.manual_seed(0)
    model, inputs = Holding(), torch.randn(6, 3)
    la = SubspaceLaplace.paper(model, "classification", dim=4).fit(loader(inputs, labels(model, inputs)))
    la(inputs)
    model.act = F.silu
    with pytest.raises(RuntimeError, match=r"functional\.relu.*functional\.silu"):
        la(inputs)


def test_weights_that_are_no_longer_tied_are_refused():
    la, model, inputs = fitted("tied-weights")
    model.again.weight = nn.Parameter(model.mix.weight.detach().clone())
    with pytest.raises(RuntimeError, match=r"'again\.weight'.*changed since fit"):
        la(inputs)
    assert isinstance(model, TiedWeights)


def test_weights_that_are_tied_after_the_fit_are_refused():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].load_state_dict(model[0].state_dict())
    inputs = torch.randn(8, 3)
    la = SubspaceLaplace.paper(model, "classification", dim=4).fit(loader(inputs, labels(model, inputs)))
    model[1].weight = model[0].weight
    with pytest.raises(RuntimeError, match="changed since fit"):
        la(inputs)


def test_an_activation_exchanged_between_save_and_load_is_refused(tmp_path):
    la, model, inputs = fitted()
    la.save(tmp_path / "posterior")
    expected = la(inputs)
    assert torch.equal(SubspaceLaplace.load(tmp_path / "posterior", copy.deepcopy(model))(inputs), expected)
    model[1] = nn.Sigmoid()
    with pytest.raises(SavedFileError, match=r"module '1' was .*Tanh\(\) when saved and is .*Sigmoid\(\) now"):
        SubspaceLaplace.load(tmp_path / "posterior", model)


# Attributes, functions and hooks --------------------------------------------------------------------------------------


class Settings(nn.Module):
    """A network whose outputs depend on attributes of many kinds."""

    factor = 2.0

    def __init__(self):
        super().__init__()
        self.inner, self.head = nn.Linear(3, 4), nn.Linear(4, 3)
        self.scale, self.power, self.mode, self.twice = 2.0, 1, "tanh", False
        self.window, self.weights, self.by_name = (0, 4), [1.0, 0.5], {"a": 1.5}
        self.vector, self.array, self.number = torch.tensor([1.0, 2.0]), np.array([1.0, 3.0]), np.float64(0.5)
        self.act, self.rounded = functools.partial(F.elu, alpha=1.0), lambda x: x * 2
        self.calls, self.last = 0, None

    def forward(self, x):
        self.calls, self.last = self.calls + 1, x
        h = self.helped(self.act(self.inner(x)[:, slice(*self.window)] * self.scale) ** self.power)
        h = h.tanh() if self.mode == "tanh" else h.sin()
        h = self.rounded(h) * self.weights[1] * self.by_name["a"] * self.vector[1] * float(self.array[1] * self.number)
        return self.head(h + h if self.twice else h)

    def helped(self, h):
        return h * self.factor


def with_settings():
    torch.manual_seed(0)
    model, inputs = Settings(), torch.randn(6, 3)
    la = SubspaceLaplace.paper(model, "classification", dim=4).fit(loader(inputs, labels(model, inputs)))
    return la, model, inputs


def other_sine(self, x):
    return self.head(self.inner(x).sin())


SETTINGS = {
    "scale": lambda model: setattr(model, "scale", 3.0),
    "power": lambda model: setattr(model, "power", 3),
    "mode": lambda model: setattr(model, "mode", "sine"),
    "twice": lambda model: setattr(model, "twice", True),
    "window": lambda model: setattr(model, "window", (0, 4, 1)),
    "weights": lambda model: model.weights.__setitem__(1, 0.25),
    "by_name": lambda model: model.by_name.update(a=1.25),
    "vector": lambda model: model.vector.add_(1),
    "array": lambda model: model.array.__iadd__(1),
    "number": lambda model: setattr(model, "number", np.float64(0.25)),
    "act": lambda model: setattr(model, "act", functools.partial(F.elu, alpha=1.1)),
    "rounded": lambda model: setattr(model, "rounded", lambda x: x * 3),
    "forward": lambda model: setattr(model, "forward", other_sine.__get__(model)),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_an_attribute_that_has_changed_is_named(name):
    la, model, inputs = with_settings()
    expected = la(inputs)
    with untouched(model):
        assert torch.equal(la(inputs), expected)
    SETTINGS[name](model)
    with pytest.raises(RuntimeError, match=rf"'?{name}'?.*changed since fit"):
        la(inputs)


@pytest.mark.parametrize("name", sorted(SETTINGS.keys() - {"rounded", "forward"}))
def test_an_attribute_that_has_changed_between_save_and_load_is_named(name, tmp_path):
    la, model, inputs = with_settings()
    la.save(tmp_path / "posterior")
    again = SubspaceLaplace.load(tmp_path / "posterior", copy.deepcopy(model))
    assert torch.equal(again(inputs), la(inputs))
    SETTINGS[name](model)
    with pytest.raises(SavedFileError, match=rf"attribute '{name}' of the model \(.* when saved, .* now\)"):
        SubspaceLaplace.load(tmp_path / "posterior", model)


def test_an_attribute_that_has_changed_stops_a_fit_from_going_on_with_its_checkpoint(tmp_path):
    _, model, inputs = with_settings()
    batches = loader(inputs, labels(model, inputs))
    la = SubspaceLaplace.paper(model, "classification", dim=4, forward=interrupting(3))
    with pytest.raises(KeyboardInterrupt):
        la.fit(batches, checkpoint=tmp_path / "checkpoint")
    model.scale = 3.0
    with pytest.raises(SavedFileError, match="another fit: its settings of modules differs"):
        SubspaceLaplace.paper(model, "classification", dim=4).fit(batches, checkpoint=tmp_path / "checkpoint")


def interrupting(passes):
    """A forward function that is interrupted after some passes."""
    remaining = [passes]

    def forward(model, x):
        remaining[0] -= 1
        if remaining[0] < 0:
            raise KeyboardInterrupt
        return model(x)

    return forward


@pytest.mark.parametrize(("name", "value"), [("forward", other_sine), ("helped", other_sine), ("factor", 3.0)])
def test_a_method_or_attribute_of_a_class_that_was_replaced_is_noticed(name, value, monkeypatch):
    la, model, inputs = with_settings()
    with monkeypatch.context() as patch:
        patch.setattr(Settings, name, value)
        with pytest.raises(RuntimeError, match=rf"'{name}' of the class .*Settings has changed since fit"):
            la(inputs)
    la(inputs)
    setattr(model, name, value.__get__(model) if callable(value) else value)
    with pytest.raises(RuntimeError, match=rf"attribute '{name}' of the model, once of its class, has changed"):
        la(inputs)


def doubled(module, arguments, output=None):
    return (2 * arguments[0],) if output is None else 2 * output


@pytest.mark.parametrize("register", ["register_forward_hook", "register_forward_pre_hook"])
def test_a_forward_hook_that_was_added_or_removed_is_noticed(register, tmp_path):
    la, model, inputs = fitted()
    la.save(tmp_path / "posterior")
    hook = getattr(model[2], register)(doubled)
    with pytest.raises(RuntimeError, match=r"forward hooks of the module '2' \(none at the fit, .*doubled now\)"):
        la(inputs)
    with pytest.raises(SavedFileError, match=r"forward hooks of the module '2' \(none when saved, .*doubled now\)"):
        SubspaceLaplace.load(tmp_path / "posterior", model)
    other = SubspaceLaplace.paper(model, "classification", dim=4).fit(loader(inputs, labels(model, inputs)))
    other(inputs)
    hook.remove()
    la(inputs)
    with pytest.raises(RuntimeError, match=r"forward hooks of the module '2' \(.*doubled at the fit, none now\)"):
        other(inputs)


def test_what_forward_passes_change_is_no_setting_and_is_given_back(tmp_path):
    la, model, inputs = with_settings()
    assert (model.calls, model.last) == (0, None)
    model(inputs)
    with untouched(model):
        la(inputs)
    assert model.calls == 1
    assert model.last is inputs
    la.save(tmp_path / "posterior")
    model.calls = 7
    SubspaceLaplace.load(tmp_path / "posterior", model)(inputs)


def test_attributes_that_no_output_depends_on_may_change():
    la, model, inputs = fitted()
    model.train()
    model.note, model.device_name, model[0].cached_length = "new", "cpu", 3
    expected = la(inputs)
    model.device_name, model[0].cached_length = "cuda:1", 4
    assert torch.equal(la(inputs), expected)


# The fingerprint ------------------------------------------------------------------------------------------------------


def test_values_that_are_not_numbers_do_not_look_like_a_change():
    model = nn.BatchNorm1d(4)
    model.running_mean[:] = torch.tensor([torch.nan, torch.inf, -torch.inf, 0.0])
    before = Fingerprint.of(model)
    assert before.difference(Fingerprint.of(model)) is None
    model.running_mean[3] = torch.nan
    assert "value" in before.difference(Fingerprint.of(model))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64])
@pytest.mark.parametrize("size", [1, 7, 1021, 20_000])
def test_every_single_bit_counts(dtype, size):
    torch.manual_seed(0)
    model = nn.Module()
    model.register_buffer("values", torch.randn(size).to(dtype))
    before = Fingerprint.of(model)
    content = model.values.view(torch.uint8).reshape(-1)
    for place in {0, size // 2, len(content) - 1}:
        content[place] ^= 1
        assert before.values != Fingerprint.of(model).values
        content[place] ^= 1
    assert before == Fingerprint.of(model)


@pytest.mark.parametrize("values", [torch.arange(5) > 2, torch.arange(3), torch.eye(3).to_sparse(), torch.empty(0)])
def test_buffers_of_every_kind_have_a_fingerprint(values):
    model = nn.Module()
    model.register_buffer("values", values)
    assert Fingerprint.of(model) == Fingerprint.of(copy.deepcopy(model))


def test_the_fingerprint_does_not_depend_on_memory_order_and_alignment():
    whole = torch.arange(2 * 3 * 4 * 5 + 1, dtype=torch.float32)
    models = [nn.Module() for _ in range(3)]
    values = whole[1:].view(2, 3, 4, 5)
    for model, tensor in zip(
        models, (values, values.clone(), values.contiguous(memory_format=torch.channels_last)), strict=True
    ):
        model.register_buffer("values", tensor)
    assert len({Fingerprint.of(model).values for model in models}) == 1
    assert np.shares_memory(models[0].values.numpy(), whole.numpy())


@pytest.mark.parametrize("call", ["__call__", "predict", "functional_covariance", "leading_traces", "bounds"])
def test_the_model_is_checked_once_per_call(call, monkeypatch):
    la, _, inputs = fitted()
    taken = []
    of = Fingerprint.of
    monkeypatch.setattr(Fingerprint, "of", lambda model: taken.append(1) or of(model))
    getattr(la, call)(inputs)
    assert len(taken) == 1
