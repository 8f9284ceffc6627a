"""Sampled output directions for KFAC and the diagonal, and sketched rows of the subspace inputs."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from sublaplace import Bernoulli, Categorical, CurvatureStream, Gaussian, Linearization, Resources, SubspaceLaplace
from sublaplace.curvature.diagonal import diagonal_ggn
from sublaplace.curvature.directions import Roots, SampledRoots, random_signs
from sublaplace.curvature.kfac import kronecker_ggn
from sublaplace.model.likelihoods.base import Likelihood

C, N = 40, 24


def network(seed=0, hidden=20):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, hidden), nn.Tanh(), nn.Linear(hidden, C)).double()


def data(n=N):
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(n, 3, generator=generator, dtype=torch.float64)
    return inputs, torch.randint(0, C, (n,), generator=generator)


def batches(size=7):
    inputs, labels = data()
    return [(inputs[i : i + size], labels[i : i + size]) for i in range(0, N, size)]


def stream(samples=None, size=7, seed=0):
    return CurvatureStream(Linearization(network()), batches(size), Categorical(), 0.0, samples=samples, seed=seed)


class Mixed(Likelihood):
    """A likelihood that gives its root as a matrix alone."""

    def log_density(self, outputs, targets):
        return outputs.double().sum(1)

    def hessian_root(self, outputs):
        mix = torch.tril(torch.ones(C, C, dtype=outputs.dtype))[:17]
        return outputs.unsqueeze(1) * mix


LIKELIHOODS = {
    "classes": Categorical(),
    "yes/no": Bernoulli(),
    "regression": Gaussian(0.5),
    "noise per output": Gaussian(tuple(0.5 + 0.1 * k for k in range(C))),
    "own": Mixed(),
}


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("name", LIKELIHOODS)
def test_sampled_directions_have_the_second_moment_of_all(name, weighted):
    generator = torch.Generator().manual_seed(0)
    outputs = torch.randn(1, C, generator=generator, dtype=torch.float64).expand(20_000, C)
    weights = torch.rand(1, C, generator=generator, dtype=torch.float64).expand(20_000, C) if weighted else None
    roots = Roots(LIKELIHOODS[name], weights)
    rows = roots(outputs[:1])
    expected = rows[0].T @ rows[0]
    sampled = SampledRoots(roots, 6, torch.arange(20_000), seed=3)(outputs)
    assert sampled.shape == (20_000, 6, C)
    found = torch.einsum("nka,nkb->ab", sampled, sampled) / 20_000
    spread = expected.diagonal().sum() / 20_000**0.5
    assert (found - expected).abs().max() < spread
    # The products of the whole root do without its matrix.
    columns = torch.randn(1, C, 3, generator=generator, dtype=torch.float64)
    products = roots.times(outputs[:1], columns)[0]
    direct = (rows @ columns)[0]
    assert torch.allclose(products.T @ products, direct.T @ direct, rtol=1e-10)


def test_the_longest_half_is_exact():
    outputs = torch.full((1, C), -30.0, dtype=torch.float64)
    outputs[0, [4, 9]] = torch.tensor([1.0, 0.5], dtype=torch.float64)  # all curvature in two rows
    roots = Roots(Categorical(), None)
    rows, sampled = roots(outputs), SampledRoots(roots, 4, torch.zeros(1), 0)(outputs)
    assert torch.allclose(sampled[0].T @ sampled[0], rows[0].T @ rows[0], atol=1e-12)


def test_signs_depend_on_seed_and_place_alone():
    signs = random_signs(5, torch.arange(1000), 3, 11)
    assert set(signs.unique().tolist()) == {-1, 1}
    assert torch.equal(random_signs(5, torch.tensor([7, 900]), 3, 11), signs[[7, 900]])
    assert not torch.equal(random_signs(6, torch.arange(1000), 3, 11), signs)
    flat = signs.double().flatten(1)
    correlations = flat.T @ flat / 1000 - torch.eye(33, dtype=torch.float64)
    assert correlations.abs().max() < 0.2  # six standard deviations of independent signs
    assert flat.mean(0).abs().max() < 0.2


def curvature(kind, samples, size=7, seed=0):
    return kind(stream(samples, size, seed), 1.0)


def gradients_of(kfac):
    return kfac.parts["0.weight"]._output_moment()[0]


@pytest.mark.parametrize("samples", [4, 16])
def test_batches_do_not_change_what_is_sampled(samples):
    one, other = (curvature(kronecker_ggn, samples, size) for size in (7, 24))
    assert torch.allclose(gradients_of(one), gradients_of(other), rtol=1e-10)
    one, other = (curvature(diagonal_ggn, samples, size) for size in (7, 24))
    assert torch.allclose(one.parts["0.weight"].diagonal, other.parts["0.weight"].diagonal, rtol=1e-10)


def test_sampled_curvature_converges_to_all_directions_at_the_expected_rate():
    def errors(kind, value):
        exact = value(curvature(kind, None))
        for samples in (4, 16):
            drawn = torch.stack([value(curvature(kind, samples, seed=seed)) for seed in range(24)])
            yield float((drawn - exact).square().mean().sqrt() / exact.square().mean().sqrt())
            bias = (drawn.mean(0) - exact).norm() / exact.norm()
            assert bias < 5 * drawn.std(0).norm() / 24**0.5 / exact.norm()

    for kind, value in (
        (kronecker_ggn, gradients_of),
        (diagonal_ggn, lambda found: found.parts["0.weight"].diagonal),
    ):
        few, many = errors(kind, value)
        assert few < 0.5
        assert 1.6 < few / many < 4  # 2 by the number of samples, and more by the rows that are taken as they are


def fitted(**options):
    resources = Resources(**options)
    return SubspaceLaplace(network(), "classification", 5, prior_precision=1.0, resources=resources).fit(batches())


def test_many_outputs_are_sampled_by_default_and_the_summary_says_so():
    sampled, exact = fitted(), fitted(curvature_samples="all")
    assert "10 sampled per input" in sampled.summary()
    assert "P from 8 random combinations of the outputs per input" in sampled.summary()
    assert "sampled" not in exact.summary() and "combinations" not in exact.summary()
    streams = [stream(samples=count) for count in (10, None)]
    for each in streams:
        kronecker_ggn(each, 1.0)
    assert [each.linearization.passes for each in streams] == [10 * N, 20 * N]  # of 20 features
    x = torch.randn(6, 3, dtype=torch.float64)
    one, other = (la.functional_variance(x) for la in (sampled, exact))
    assert (one - other).norm() < 0.1 * other.norm()
    again = fitted()
    assert torch.equal(again.functional_variance(x), one)


def test_no_more_directions_are_sampled_than_there_are_features():
    la = SubspaceLaplace(network(hidden=10), "classification", 5, prior_precision=1.0).fit(batches())
    exact = SubspaceLaplace(
        network(hidden=10), "classification", 5, prior_precision=1.0, resources=Resources(curvature_samples="all")
    ).fit(batches())
    assert "sampled" not in la.summary()
    for name, part in la._state.posterior.outside.parts.items():
        assert torch.allclose(part.eigenvalues(), exact._state.posterior.outside.parts[name].eigenvalues(), rtol=1e-9)


def test_the_posterior_in_the_subspace_has_all_directions():
    la = SubspaceLaplace.paper(network(), "classification", 5).fit(batches())
    assert "random combinations" in la.summary()
    P = la.projection_matrix()
    exact = SubspaceLaplace.paper(network(), "classification", projector=lambda context: la._subspace().projection)
    exact = replace_samples(exact).fit(batches())
    x = torch.randn(6, 3, dtype=torch.float64)
    assert torch.equal(exact.projection_matrix(), P)
    assert torch.allclose(la.functional_covariance(x), exact.functional_covariance(x), rtol=1e-9)


def replace_samples(la):
    la._options = la._resolved = replace(la._resolved, resources=Resources(curvature_samples="all"))
    return la


def test_a_subspace_from_a_sketch_captures_as_much():
    x = torch.randn(30, 3, generator=torch.Generator().manual_seed(5), dtype=torch.float64)

    def trace(seed, **options):
        la = SubspaceLaplace.paper(network(seed), "classification", 12, resources=Resources(**options)).fit(batches())
        return float(la.leading_traces(x)[-1])

    shares = [trace(seed) / trace(seed, curvature_samples="all") for seed in range(3)]
    assert sum(shares) / 3 > 0.97 and min(shares) > 0.95


def test_few_outputs_are_not_sampled_unless_asked_for():
    assert Resources().samples(32) is None and Resources().samples(33) == 10
    assert Resources(curvature_samples=4).samples(10) == 4
    assert Resources(curvature_samples=10).samples(10) is None
    assert Resources(curvature_samples="all").samples(10_000) is None


@pytest.mark.parametrize("samples", [0, -1, 2.5, True, "some"])
def test_other_numbers_of_samples_are_refused(samples):
    with pytest.raises(ValueError, match="curvature_samples"):
        Resources(curvature_samples=samples)


def test_samples_are_kept_in_files_and_by_updates(tmp_path):
    la = fitted(curvature_samples=6)
    la.save(tmp_path / "la.safetensors")
    again = SubspaceLaplace.load(tmp_path / "la.safetensors", la.model)
    assert again._options.resources.curvature_samples == 6
    inputs, labels = data(10)
    more = [(inputs, labels)]
    before = la._state.linearization.passes
    la.updated(more)
    assert la._state.linearization.passes - before < 10 * (6 + C)


def test_a_resumed_fit_samples_the_same_directions(tmp_path, monkeypatch):
    from sublaplace.runtime import checkpoint

    monkeypatch.setattr(checkpoint, "SECONDS_BETWEEN_WRITES", 0.0)
    monkeypatch.setattr(checkpoint, "_WRITING_SHARE", 1e9)

    class Killed(list):
        left = 40

        def __iter__(self):
            for batch in super().__iter__():
                Killed.left -= 1
                if not Killed.left:
                    raise KeyboardInterrupt
                yield batch

    def la():
        return SubspaceLaplace(network(), "classification", 5, prior_precision=1.0)

    whole = la().fit(batches(2))
    data_of = Killed(batches(2))
    with pytest.raises(KeyboardInterrupt):
        la().fit(data_of, checkpoint=tmp_path / "fit")
    resumed = la().fit(data_of, checkpoint=tmp_path / "fit")
    x = torch.randn(6, 3, dtype=torch.float64)
    assert torch.equal(resumed.functional_variance(x), whole.functional_variance(x))
