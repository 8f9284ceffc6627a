"""`train`: the MAP in closed form, λ and σ of the largest evidence, and every kind of data that a fit takes."""

import copy
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from sublaplace import Categorical, Gaussian, SubspaceLaplace, train

SGD = partial(torch.optim.SGD, lr=0.05, momentum=0.9)


def linear_data(n=40, outputs=1, noise=0.3, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 3, generator=generator, dtype=torch.float64)
    true = torch.randn(3, outputs, generator=generator, dtype=torch.float64)
    return x, x @ true + noise * torch.randn(n, outputs, generator=generator, dtype=torch.float64)


def classes(n=90, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 4, generator=generator, dtype=dtype)
    return x, (x[:, :3] + 0.5 * torch.randn(n, 3, generator=generator, dtype=dtype)).argmax(1)


def network(*between, seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), *between, nn.Tanh(), nn.Linear(8, 3))


def linear(outputs=1):
    torch.manual_seed(0)
    return nn.Linear(3, outputs, bias=False, dtype=torch.float64)


def ridge(x, y, penalty):
    return torch.linalg.solve(x.T @ x + penalty, x.T @ y).T


# The MAP --------------------------------------------------------------------------------------------------------------


def test_the_network_ends_at_the_map():
    x, y = linear_data()
    model = linear()
    result = train(model, [(x, y)], Gaussian(0.5), epochs=300, optimizer=SGD, prior_precision=2.0)
    penalty = 2.0 * 0.5**2 * torch.eye(3, dtype=torch.float64)
    torch.testing.assert_close(model.weight.detach(), ridge(x, y, penalty), rtol=1e-5, atol=1e-6)
    assert result.prior_precision == 2.0 and result.noise_std == 0.5 and not result.evidence
    assert len(result.objective) == 300


def test_every_parameter_can_have_its_own_prior():
    x, y = linear_data()

    class Split(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.rest = (nn.Linear(width, 1, bias=False, dtype=torch.float64) for width in (1, 2))

        def forward(self, x):
            return self.first(x[:, :1]) + self.rest(x[:, 1:])

    model = Split()
    priors = {"first.weight": 100.0, "rest.weight": 0.1}
    result = train(model, [(x, y)], Gaussian(1.0), epochs=400, optimizer=SGD, prior_precision=priors)
    expected = ridge(x, y, torch.tensor([100.0, 0.1, 0.1], dtype=torch.float64).diag())
    found = torch.cat([model.first.weight, model.rest.weight], dim=1).detach()
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert result.prior_precision == priors


def test_the_objective_is_the_one_of_the_map():
    x, y = classes(dtype=torch.float64)
    model = network().double()
    before = copy.deepcopy(model)
    result = train(model, [(x, y)], "classification", epochs=1, prior_precision=3.0)
    norm = sum(p.detach().square().sum() for p in model.parameters())
    expected = nn.functional.cross_entropy(before(x), y) + 3.0 * norm / (2 * len(x))
    assert result.objective[0] == pytest.approx(expected.item(), rel=1e-12)


def test_a_weight_of_two_counts_like_the_input_twice():
    x, y = linear_data()
    weights = 1.0 + (torch.arange(len(x)) % 2)
    twice = weights == 2
    models = linear(), linear()
    options = {"epochs": 300, "optimizer": SGD, "prior_precision": 2.0}
    train(models[0], [(x, y, weights)], Gaussian(0.5), **options)
    train(models[1], [(torch.cat([x, x[twice]]), torch.cat([y, y[twice]]))], Gaussian(0.5), **options)
    torch.testing.assert_close(models[0].weight, models[1].weight, rtol=1e-5, atol=1e-6)


# λ and σ --------------------------------------------------------------------------------------------------------------


def test_the_evidence_chooses_prior_and_noise():
    x, y = linear_data(n=200)
    model = linear()
    result = train(model, [(x, y)], "regression", epochs=200, optimizer=SGD)
    assert result.noise_std == pytest.approx(0.3, rel=0.15)
    assert len(result.evidence) == 10
    # The layer has no bias and one output, so KFAC is exact, and so is its evidence.
    la = SubspaceLaplace(model, result.likelihood, projector="full", prior_precision=result.prior_precision)
    la.fit([(x, y)])
    best = copy.deepcopy(la)
    best.optimize_prior_precision(method="marglik", tune_noise=True)
    assert best.prior_precision == pytest.approx(result.prior_precision, rel=0.05)
    assert best.noise_std == pytest.approx(result.noise_std, rel=0.02)
    assert float(la.log_marginal_likelihood()) == pytest.approx(result.evidence[-1], rel=1e-3)


def test_the_noise_is_tuned_under_given_priors_of_the_parameters():
    x, y = linear_data(n=200)
    result = train(linear(), [(x, y)], "regression", epochs=100, optimizer=SGD, prior_precision={"weight": 2.0})
    assert result.prior_precision == {"weight": 2.0}
    assert result.noise_std == pytest.approx(0.3, rel=0.15)


@pytest.mark.parametrize("factor", [1e-3, 1e3])
def test_the_noise_follows_the_unit_of_the_targets(factor):
    x, y = linear_data(n=100)
    model = linear()
    nn.init.zeros_(model.weight)
    adam = partial(torch.optim.Adam, lr=0.1 * factor)
    result = train(model, [(x, factor * y)], "regression", epochs=100, optimizer=adam)
    assert result.noise_std == pytest.approx(0.3 * factor, rel=0.25)


def test_noise_per_output():
    x, y = linear_data(n=300, outputs=2, noise=torch.tensor([0.1, 1.0], dtype=torch.float64))
    result = train(linear(2), [(x, y)], Gaussian("per-output"), epochs=100, optimizer=partial(SGD, lr=0.005))
    assert result.noise_std == pytest.approx((0.1, 1.0), rel=0.2)


def test_one_prior_per_layer_leads_to_the_posterior():
    x, y = classes()
    loader = DataLoader(TensorDataset(x, y), batch_size=30, shuffle=True)
    model = network()
    result = train(model, loader, "classification", epochs=20, learning_rate=0.03, prior_structure="layer")
    priors = result.prior_precision
    assert set(priors) == {name for name, _ in model.named_parameters()}
    assert priors["0.weight"] == priors["0.bias"] != priors["2.weight"]
    la = SubspaceLaplace(model, result.likelihood, 10, prior_precision=priors).fit(loader)
    assert la.prior_precisions == pytest.approx(priors, rel=1e-9)
    # KFAC's own evidence, of the layers together, is the one that the training saw.
    chosen = SubspaceLaplace(model, "classification", 10, prior_precision="evidence", prior_structure="layer")
    assert chosen.fit(loader).prior_precisions["2.weight"] == pytest.approx(priors["2.weight"], rel=0.7)


def test_equal_priors_of_all_parameters_are_one_prior(tmp_path):
    x, y = classes(dtype=torch.float64)
    model = network().double()
    several = {name: 2.0 for name, _ in model.named_parameters()}
    one, many = (
        SubspaceLaplace(model, "classification", 6, prior_precision=prior).fit([(x, y)]) for prior in (2.0, several)
    )
    torch.testing.assert_close(one.functional_covariance(x), many.functional_covariance(x))
    assert many.prior_precision == pytest.approx(2.0)
    many.save(tmp_path / "la.safetensors")
    loaded = SubspaceLaplace.load(tmp_path / "la.safetensors", model)
    assert loaded.prior_precisions == many.prior_precisions


def test_different_priors_are_those_of_the_dense_posterior():
    x, y = linear_data()
    model = nn.Sequential(nn.Linear(3, 2, dtype=torch.float64), nn.Linear(2, 1, dtype=torch.float64))
    priors = dict(zip(("0.weight", "0.bias", "1.weight", "1.bias"), (0.5, 4.0, 2.0, 30.0), strict=True))
    la = SubspaceLaplace(model, Gaussian(0.5), projector="full", prior_precision=priors).fit([(x, y)])
    jacobians = torch.func.jacrev(
        lambda *values: torch.func.functional_call(model, dict(zip(priors, values, strict=True)), (x,)),
        argnums=tuple(range(4)),
    )(*(p.detach() for p in model.parameters()))
    J = torch.cat([part.reshape(len(x), -1) for part in jacobians], dim=1)
    prior = torch.cat([torch.full((p.numel(),), priors[name]) for name, p in model.named_parameters()]).double()
    covariance = J @ torch.linalg.inv(J.T @ J / 0.25 + prior.diag()) @ J.T
    torch.testing.assert_close(la.functional_variance(x)[:, 0], covariance.diagonal())


# Kinds of data and of networks ----------------------------------------------------------------------------------------


def test_hugging_face_models_and_labels_under_another_key():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=20, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, num_labels=2
    )
    model = transformers.BertForSequenceClassification(config)
    words = torch.randint(2, 20, (32, 6))
    topics = (words[:, 0] > 10).long()
    mask = torch.ones_like(words)
    batches = [
        {"input_ids": words[k : k + 8], "attention_mask": mask[k : k + 8], "topic": topics[k : k + 8]}
        for k in range(0, 32, 8)
    ]
    for p in model.bert.embeddings.parameters():
        p.requires_grad_(False)
    frozen = copy.deepcopy(model.bert.embeddings.state_dict())
    result = train(model, batches, "classification", epochs=6, learning_rate=0.01, labels_key="topic")
    assert result.objective[-1] < result.objective[0]
    assert all(torch.equal(value, frozen[key]) for key, value in model.bert.embeddings.state_dict().items())
    la = SubspaceLaplace(model, result.likelihood, 5, prior_precision=result.prior_precision, labels_key="topic")
    assert la.fit(batches)(batches[0]).shape == (8, 2)


def test_only_the_training_counts_in_the_statistics_of_batch_norm():
    x, y = classes()
    model = network(nn.BatchNorm1d(8))
    loader = DataLoader(TensorDataset(x, y), batch_size=30)
    train(model, loader, "classification", epochs=6, learning_rate=0.01, val_loader=[(x[:9] + 5, y[:9])])
    assert int(model[1].num_batches_tracked) == 6 * 3
    by_hand = network(nn.BatchNorm1d(8))
    train(by_hand, loader, "classification", epochs=6, learning_rate=1e-12, prior_precision=1.0)
    again = network(nn.BatchNorm1d(8))
    for _ in range(6):
        for inputs, _ in loader:
            again(inputs)
    torch.testing.assert_close(by_hand[1].running_mean, again[1].running_mean, rtol=1e-4, atol=1e-6)


def test_classes_at_positions_with_a_mask():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(24, 5, 3, generator=generator)
    y = x.argmax(-1)
    mask = torch.ones(24, 5, dtype=torch.bool)
    mask[:, 3:] = False
    wrong = y.clone()
    wrong[:, 3:] = 0  # does not count
    models = [nn.Linear(3, 3) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    likelihood = Categorical(class_dim=2)
    for model, targets in zip(models, (y, wrong), strict=True):
        train(model, [(x, targets, mask)], likelihood, epochs=30, learning_rate=0.1)
    assert torch.equal(models[0].weight, models[1].weight)
    assert float((models[0](x).argmax(-1) == y).float().mean()) > 0.9


def test_validation_data_are_recorded_and_decide_nothing():
    x, y = classes()
    parts = [(x[:60], y[:60])], [(x[60:], y[60:])]
    models = network(), network()
    with_them = train(models[0], parts[0], "classification", epochs=5, val_loader=parts[1])
    without = train(models[1], parts[0], "classification", epochs=5)
    assert with_them.objective == without.objective and not without.validation_nll
    assert len(with_them.validation_nll) == 5
    with torch.no_grad():
        last = nn.functional.cross_entropy(models[0](x[60:]), y[60:])
    assert with_them.validation_nll[-1] == pytest.approx(last.item(), rel=1e-5)


def test_the_evidence_can_see_the_data_in_another_form():
    x, y = classes()
    whole, steps = [(x, y)], DataLoader(TensorDataset(x, y), batch_size=10, drop_last=True)
    seen = []

    class Watched(list):
        def __iter__(self):
            seen.append(1)
            return super().__iter__()

    result = train(network(), steps, "classification", epochs=4, evidence_loader=Watched(whole))
    # Asked whether it can be read again, looked at, and each time looked at again and read for KFAC.
    assert len(seen) == 2 + 2 * len(result.evidence)


def test_the_seed_decides_dropout_and_order_and_leaves_the_global_state():
    x, y = classes()
    found = []
    for seed in (1, 1, 2):
        model = network(nn.Dropout(0.3))
        state = torch.get_rng_state()
        loader = DataLoader(TensorDataset(x, y), batch_size=20, shuffle=True)
        found.append(train(model, loader, "classification", epochs=3, seed=seed).objective)
        assert torch.equal(torch.get_rng_state(), state)
        assert not model.training
    assert found[0] == found[1] != found[2]


def test_sparse_gradients_and_parameters_that_nothing_uses():
    class Words(nn.Module):
        def __init__(self):
            super().__init__()
            self.words, self.head, self.spare = nn.Embedding(6, 4, sparse=True), nn.Linear(4, 2), nn.Linear(2, 2)

        def forward(self, x):
            return self.head(self.words(x).mean(1))

    torch.manual_seed(0)
    model = Words()
    spare = copy.deepcopy(model.spare.state_dict())
    x = torch.randint(0, 6, (20, 3))
    result = train(model, [(x, (x[:, 0] > 2).long())], "classification", epochs=10, learning_rate=0.05)
    assert result.objective[-1] < result.objective[0]
    assert all(torch.equal(value, spare[key]) for key, value in model.spare.state_dict().items())


# Bad input ------------------------------------------------------------------------------------------------------------

DATA = classes()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"epochs": 0}, "epochs must be a positive integer"),
        ({"epochs": 1}, "at least 2"),
        ({"learning_rate": -1.0}, "learning_rate must be positive"),
        ({"learning_rate": 0.1, "optimizer": SGD}, "learning_rate has no effect"),
        ({"optimizer": torch.optim.AdamW}, "weight_decay=0"),
        ({"optimizer": lambda parameters: None}, "must return a torch.optim.Optimizer"),
        ({"optimizer": "adam"}, "must be a function"),
        ({"prior_precision": "auto"}, "'evidence'"),
        ({"prior_precision": 0.0}, "prior_precision must be positive"),
        ({"prior_precision": {"0.weight": 1.0}}, r"missing: \['0.bias'"),
        ({"prior_precision": 1.0, "prior_structure": "layer"}, "no effect"),
        ({"prior_structure": "row"}, "Unknown prior_structure"),
        ({"val_loader": [(DATA[0], DATA[1] + 5)]}, "labels|classes"),
        ({"learning_rate": 1e30, "prior_precision": 1.0}, "diverged"),
        ({"loader": [(DATA[0], DATA[1].float())]}, "integer|labels"),
        ({"loader": iter([DATA])}, "one-shot"),
        ({"loader": []}, "empty"),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value),  # without addresses, which differ
)
def test_bad_input_is_named_and_changes_nothing(options, message):
    model = network(nn.BatchNorm1d(8))
    model[1].eval()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises((ValueError, TypeError), match=message):
        train(model, **{"loader": [DATA], "likelihood": "classification", "epochs": 4, **options})
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert model.training and not model[1].training
    assert all(p.grad is None and p.requires_grad for p in model.parameters())


def test_an_interrupt_leaves_the_network_as_trained_so_far():
    class Interrupted(list):
        passes = 0

        def __iter__(self):
            self.passes += 1
            if self.passes == 6:
                raise KeyboardInterrupt
            return super().__iter__()

    model = network()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(KeyboardInterrupt):
        train(model, Interrupted([DATA]), "classification", epochs=50, prior_precision=1.0)
    assert not torch.equal(model.state_dict()["0.weight"], before["0.weight"])
    assert all(p.grad is None and p.requires_grad for p in model.parameters())


def test_what_cannot_be_trained_is_named():
    with pytest.raises(ValueError, match="small steps"):
        train(network().half(), [DATA], "classification")
    with pytest.raises(TypeError, match=r"must be a torch\.nn\.Module"):
        train(None, [DATA], "classification")
    constant = nn.Linear(3, 1)
    x = torch.randn(5, 3)
    with pytest.raises(ValueError, match="no scale"), torch.no_grad():
        train(constant, [(x, constant(x) + 1.0)], "regression")
    with pytest.raises(ValueError, match="for each parameter"):
        SubspaceLaplace(network(), "classification", prior_precision={"weight": 1.0})
