"""Posteriors on disk: what comes back is what was saved, and nothing else comes back."""

import copy
import pickle
import random
import warnings
import zipfile

import pytest
import torch
from networks import make
from safetensors.torch import save_file
from test_laplace import labels, loader, sized

from sublaplace import PROJECTORS, Categorical, Complement, Gaussian, SavedFileError, SubspaceLaplace
from sublaplace.model.likelihoods.base import likelihood_from


def fitted(name="paper-cnn", projector="lowrank-kfac", dtype=torch.float64):
    model, inputs = make(name, 8, dtype)
    la = SubspaceLaplace.paper(model, "classification", **sized(projector, 4), prior_precision=0.7)
    return la.fit(loader(inputs, labels(model, inputs))), model, inputs


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("projector", [*PROJECTORS, "full"])
def test_a_loaded_posterior_predicts_bit_for_bit_the_same(projector, dtype, tmp_path):
    la, model, inputs = fitted(projector=projector, dtype=dtype)
    la.save(tmp_path / "la.safetensors")
    loaded = SubspaceLaplace.load(tmp_path / "la.safetensors", model)
    assert torch.equal(loaded(inputs), la(inputs))
    assert torch.equal(loaded.functional_covariance(inputs), la.functional_covariance(inputs))
    assert loaded.log_marginal_likelihood() == la.log_marginal_likelihood()
    assert (loaded.dim, loaded.prior_precision, loaded.num_parameters) == (
        la.dim,
        la.prior_precision,
        la.num_parameters,
    )


def test_a_loaded_regression_keeps_its_noise_and_can_be_updated(tmp_path):
    model, inputs = make("mlp", 12)
    targets = torch.randn(12, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    la = SubspaceLaplace.paper(model, "regression", dim=4).fit(loader(inputs, targets))
    la.save(tmp_path / "la.safetensors")
    loaded = SubspaceLaplace.load(tmp_path / "la.safetensors", model)
    assert loaded.noise_std == la.noise_std
    more = loader(inputs[:6] + 1, targets[:6])
    again, before = loaded.updated(more), la.updated(more)
    assert again.noise_std == before.noise_std
    assert torch.equal(again.functional_variance(inputs), before.functional_variance(inputs))


def test_another_model_is_refused_with_what_differs(tmp_path):
    la, model, _ = fitted()
    path = tmp_path / "la.safetensors"
    la.save(path)
    changed = copy.deepcopy(model)
    with torch.no_grad():
        changed.head.bias += 1
    with pytest.raises(SavedFileError, match=r"'head.bias' has other values"):
        SubspaceLaplace.load(path, changed)
    frozen = copy.deepcopy(model)
    frozen.head.bias.requires_grad_(False)
    with pytest.raises(SavedFileError, match=r"'head.bias' has other requires_grad flag"):
        SubspaceLaplace.load(path, frozen)
    with pytest.raises(SavedFileError, match=r"other dtype: torch.float64 when saved, torch.float32 now"):
        SubspaceLaplace.load(path, copy.deepcopy(model).float())
    with pytest.raises(SavedFileError, match="lacks"):
        SubspaceLaplace.load(path, make("mlp", 1)[0])


def test_files_that_are_not_ours_are_refused(tmp_path):
    _, model, _ = fitted()
    foreign = tmp_path / "foreign.safetensors"
    save_file({"a": torch.zeros(3)}, foreign)
    with zipfile.ZipFile(tmp_path / "pickled.pt", "w") as archive:
        archive.writestr("data.pkl", b"cos\nsystem\n(S'false'\ntR.")
    (tmp_path / "empty").write_bytes(b"")
    for name in ("foreign.safetensors", "pickled.pt", "empty", "missing"):
        with pytest.raises(SavedFileError):
            SubspaceLaplace.load(tmp_path / name, model)


def test_every_altered_byte_is_noticed(tmp_path):
    la, model, _ = fitted("mlp")
    path = tmp_path / "la.safetensors"
    la.save(path)
    original = path.read_bytes()
    chooser = random.Random(0)
    for _ in range(2000):
        altered = bytearray(original)
        place = chooser.randrange(len(altered))
        altered[place] ^= chooser.randrange(1, 256)
        path.write_bytes(altered)
        with pytest.raises(SavedFileError):
            SubspaceLaplace.load(path, model)
    for length in (0, 7, 8, 100, len(original) // 2, len(original) - 1):
        path.write_bytes(original[:length])
        with pytest.raises(SavedFileError):
            SubspaceLaplace.load(path, model)
    path.write_bytes(original + b"\0")
    with pytest.raises(SavedFileError):
        SubspaceLaplace.load(path, model)
    path.write_bytes(original)
    SubspaceLaplace.load(path, model)


def test_an_interrupted_save_leaves_the_old_file(tmp_path, monkeypatch):
    la, model, inputs = fitted()
    path = tmp_path / "la.safetensors"
    la.save(path)
    monkeypatch.setattr("sublaplace.runtime.files._digest", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        la.with_prior(9.0).save(path)
    monkeypatch.undo()
    assert [file.name for file in tmp_path.iterdir()] == ["la.safetensors"]
    assert torch.equal(SubspaceLaplace.load(path, model)(inputs), la(inputs))


@pytest.mark.parametrize("likelihood", ["regression", Gaussian("per-output"), Gaussian(0.3)], ids=repr)
def test_a_loaded_posterior_knows_whether_its_noise_was_given(likelihood, tmp_path):
    model, inputs = make("mlp", 60)
    targets = model(inputs).detach() + torch.linspace(-0.5, 0.5, 60, dtype=torch.float64)[:, None]
    train, validation = loader(inputs[:30], targets[:30]), loader(inputs[30:], targets[30:] * 2)
    la = SubspaceLaplace(model, likelihood).fit(train, validation)
    la.save(tmp_path / "la.safetensors")
    loaded = SubspaceLaplace.load(tmp_path / "la.safetensors", model)
    assert loaded.noise_std == la.noise_std and loaded.likelihood == la.likelihood
    found, expected = loaded.evaluate(validation), la.evaluate(validation)
    assert found.plain.scores == pytest.approx(expected.plain.scores)
    assert found.posterior.scores == pytest.approx(expected.posterior.scores)
    assert "but P has rank" in la.summary() and "but P has rank" in loaded.summary()
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # as a fit with the default dimension
        assert repr(loaded.fit(train, validation)) == repr(la)


def test_the_summary_tells_what_was_fitted():
    la, _, _ = fitted("lstm")
    text = la.summary()
    for part in (
        "s=4",
        "λ=0.7",
        "data N              8 inputs",
        "cell.weight_ih_l0: lstm",
        "reduced posterior",
        "backward passes",
        "KFAC trace",
    ):
        assert part in text


def test_a_loaded_posterior_of_a_custom_projector_predicts_but_does_not_pretend_to_know_it(tmp_path):
    la, model, inputs = fitted()

    def my_function(context):
        return la._state.posterior.projection

    own = SubspaceLaplace.paper(model, "classification", projector=my_function)
    batches = loader(inputs, labels(model, inputs))
    own.fit(batches).save(tmp_path / "la.safetensors")
    loaded = SubspaceLaplace.load(tmp_path / "la.safetensors", model)
    assert torch.equal(loaded(inputs), own(inputs))
    assert "my_function" in repr(loaded)
    with pytest.raises(RuntimeError, match="was loaded, and its projector is not defined here"):
        loaded.fit(batches)


@pytest.mark.parametrize(
    ("projector", "complement"),
    [("full", None), ("lowrank-kfac", None), ("lowrank-kfac", "kfac"), ("subset-diagonal", "diagonal")],
)
def test_a_pickled_or_copied_posterior_predicts_the_same(projector, complement):
    model, inputs = make("paper-cnn", 8)
    outside = None if complement is None else Complement(complement, weight=1.0)
    la = SubspaceLaplace(model, "classification", **sized(projector, 4), complement=outside, prior_precision=1.0)
    la.fit(loader(inputs, labels(model, inputs)))
    for other in (pickle.loads(pickle.dumps(la)), copy.deepcopy(la)):
        assert other.model is not model
        assert torch.allclose(other(inputs), la(inputs), rtol=1e-12, atol=0)
        assert torch.allclose(other.with_prior(3.0)(inputs), la.with_prior(3.0)(inputs), rtol=1e-12, atol=0)


def test_a_pickle_does_not_carry_the_training_data():
    model, inputs = make("mlp", 400)
    data = loader(inputs, labels(model, inputs), 100)
    la = SubspaceLaplace.paper(model, "classification", dim=3).fit(data)
    pickled = pickle.dumps(la)
    assert inputs[100:200].numpy().tobytes()[:400] not in pickled
    other = pickle.loads(pickled)
    for member in (other.bounds, other.captured_share, other.full_covariance):
        with pytest.raises(RuntimeError, match=r"training data, which are not kept.*train_loader"):
            member(inputs[:2])
    assert torch.allclose(other.bounds(inputs[:2], data).upper, la.bounds(inputs[:2]).upper, rtol=1e-9)
    assert torch.allclose(other.captured_share(inputs[:2]), la.captured_share(inputs[:2]), rtol=1e-9)
    found, expected = other.full_covariance(inputs[:2], data), la.full_covariance(inputs[:2])
    assert torch.allclose(found.covariance, expected.covariance, rtol=1e-6)


def test_a_file_without_a_link_keeps_the_one_that_it_was_made_for():
    saved = Categorical(ignore_index=3).numbers()
    assert likelihood_from(saved) == Categorical(ignore_index=3)
    del saved["link"]
    assert likelihood_from(saved) == Categorical(ignore_index=3, link="probit")
