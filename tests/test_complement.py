"""Exact in the subspace, KFAC or diagonal outside: against brute force in float64 on every network."""

import pytest
import torch
from dense_reference import dense_ggn, dense_jacobian, dense_outputs, full_covariance, softmax_hessians
from networks import NETWORKS, make, pairs
from test_laplace import labels, loader, sized

from sublaplace import Complement, Gaussian, Subset, SubspaceLaplace
from sublaplace.data.batches import num_inputs, select

PRIOR, NOISE = 0.7, 0.4
KINDS = ["classification", "regression"]
SMALL = ["mlp", "paper-cnn", "transformer", "embedding"]
KFAC = Complement("kfac", weight=1.0)
OUTSIDE = {"kfac": KFAC, "diagonal": Complement("diagonal", weight=1.0)}


class Problem:
    """A network, training data, new inputs, and the dense matrices of both."""

    def __init__(self, name, kind, dtype=torch.float64, skip=0):
        self.model, inputs = make(name, 12, dtype)
        n = num_inputs(inputs)
        self.training, self.new = select(inputs, slice(skip, n - 4)), select(inputs, slice(n - 4, n))
        outputs = dense_outputs(self.model, self.training)
        if kind == "classification":
            targets, hessians = labels(self.model, self.training), softmax_hessians(outputs)
            self.options = {"likelihood": "classification"}
        else:
            generator = torch.Generator().manual_seed(5)
            targets = (outputs + 0.3 * torch.randn(outputs.shape, generator=generator, dtype=torch.float64)).to(dtype)
            hessians = torch.eye(outputs.shape[1]).double().expand(len(outputs), -1, -1) / NOISE**2
            self.options = {"likelihood": Gaussian(NOISE)}
        self.batches = loader(self.training, targets, 3)
        self.ggn = dense_ggn(self.model, self.training, hessians)
        self.jacobian = dense_jacobian(self.model, self.new)
        self.precision = self.ggn + PRIOR * torch.eye(len(self.ggn)).double()

    def fit(self, certify=False, **options):
        options = {"dim": 5, "complement": None, "prior_precision": PRIOR, **self.options, **options}
        return SubspaceLaplace(self.model, **options).fit(self.batches, certify=certify)

    def fit_outside(self, kind):
        """No subspace: the complement alone."""
        return self.fit(projector=None, dim=None, complement=OUTSIDE[kind])

    def covariance(self, la):
        return la.functional_covariance(self.new, joint=True).double()


def dense_outside(problem, complement, prior=PRIOR):
    """Ψ_K as a matrix, column by column through its precision's own solve; made once for each problem."""
    made = problem.__dict__.setdefault("outside", {})
    if (complement, prior) not in made:
        posterior = problem.fit_outside(complement)._state.posterior.with_prior(prior)
        identity = torch.eye(len(problem.ggn), dtype=torch.float64)
        layout = posterior.layout
        made[complement, prior] = layout.flatten(posterior.solve(layout.unflatten(identity))).T
    return made[complement, prior]


def dense_complemented(problem, Q, outside, prior=PRIOR):
    """Ψ̃ = Q A⁻¹ Qᵀ + (I − Π) Ψ_K (I − Π)ᵀ, as it is written."""
    Q, identity = Q.double(), torch.eye(len(problem.ggn), dtype=torch.float64)
    precision = problem.ggn + prior * identity
    A = Q.T @ precision @ Q
    Pi = Q @ torch.linalg.solve(A, Q.T @ precision)
    return Q @ torch.linalg.solve(A, Q.T) + (identity - Pi) @ outside @ (identity - Pi).T


def close(found, expected, tolerance=1e-8):
    return (found - expected).abs().max() <= tolerance * expected.abs().max()


@pytest.mark.parametrize(("name", "kind"), pairs(KINDS))
def test_the_covariance_is_that_of_the_formula(name, kind):
    problem = Problem(name, kind)
    la = problem.fit(complement=KFAC)
    expected = dense_complemented(problem, la.projection_matrix(), dense_outside(problem, "kfac"))
    joint = problem.jacobian @ expected @ problem.jacobian.T
    assert close(problem.covariance(la), joint)
    n, C = la.functional_variance(problem.new).shape
    blocks = torch.stack([joint[i * C : (i + 1) * C, i * C : (i + 1) * C] for i in range(n)])
    assert close(la.functional_covariance(problem.new), blocks)
    assert close(la.functional_variance(problem.new), blocks.diagonal(dim1=1, dim2=2))


@pytest.mark.parametrize("projector", ["lowrank-isotropic", "lowrank-ggn", "subset-magnitude", "last-layer"])
@pytest.mark.parametrize("complement", ["kfac", "diagonal"])
def test_every_projector_takes_every_complement(projector, complement):
    problem = Problem("mlp", "classification")
    la = problem.fit(**{"dim": None} | sized(projector, 5), complement=OUTSIDE[complement])
    expected = dense_complemented(problem, la.projection_matrix(), dense_outside(problem, complement))
    assert close(problem.covariance(la), problem.jacobian @ expected @ problem.jacobian.T)


@pytest.mark.parametrize("name", NETWORKS)
def test_it_is_exact_where_it_was_measured(name):
    """Ψ̃ΛQ = Q, through the library's own B and Q: the covariance of (ΛQ)ᵀθ with θ is Q."""
    problem = Problem(name, "regression")
    la = problem.fit(complement=KFAC)
    posterior, Q = la._state.posterior, la.projection_matrix()
    # Ψ̃ΛQ = Q + (I − Π) Ψ_K (I − Π)ᵀ ΛQ, and (I − Π)ᵀΛQ = ΛQ − ΛQ A⁻¹ QᵀΛQ, which must vanish.
    layout = la._layout
    measured = (problem.precision @ Q).T
    whitened = torch.cat(
        [
            posterior.outside.parts[n].rotate(part) * (posterior.outside.parts[n].eigenvalues() + PRIOR).rsqrt()
            for n, part in layout.unflatten(measured).items()
        ],
        dim=1,
    )
    B = layout.flatten(posterior.mixed)
    A = posterior.inside.factor @ posterior.inside.factor.T
    rest = whitened - torch.linalg.solve(A, Q.T @ measured.T).T @ B
    assert rest.abs().max() <= 1e-8 * whitened.abs().max()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", SMALL)
def test_no_dimension_is_the_kfac_approximation_and_all_of_them_the_full_one(name, kind):
    problem = Problem(name, kind)
    nothing = problem.fit_outside("kfac")
    expected = problem.jacobian @ dense_outside(problem, "kfac") @ problem.jacobian.T
    assert nothing.dim == 0
    assert close(problem.covariance(nothing), expected)
    p = len(problem.ggn)
    generator = torch.Generator().manual_seed(0)

    def everything(context):
        order = torch.randperm(p, generator=generator)
        return Subset(context.linearization.layout, order, torch.float64)

    whole = problem.fit(projector=everything, dim=p, complement=KFAC)
    full = full_covariance(problem.jacobian, problem.precision)
    assert close(problem.covariance(whole), full, 1e-7)


@pytest.mark.parametrize("kind", KINDS)
def test_a_subspace_that_holds_all_that_matters_leaves_nothing_to_the_complement(kind):
    problem = Problem("mlp", kind)
    rows = len(problem.jacobian)
    la = problem.fit(projector="lowrank-ggn", dim=rows, subspace_inputs=problem.new, complement=KFAC)
    assert close(problem.covariance(la), full_covariance(problem.jacobian, problem.precision))


@pytest.mark.parametrize("kind", KINDS)
def test_it_lies_above_the_subspace_and_is_positive_definite(kind):
    problem = Problem("paper-cnn", kind)
    la = problem.fit(complement=KFAC)
    psi = dense_complemented(problem, la.projection_matrix(), dense_outside(problem, "kfac"))
    assert torch.linalg.eigvalsh(psi).min() > 0
    difference = problem.covariance(la) - problem.covariance(problem.fit())
    assert torch.linalg.eigvalsh(difference).min() >= -1e-12 * difference.abs().max()


@pytest.mark.parametrize("kind", KINDS)
def test_truncation_and_another_prior_equal_a_fit_with_them(kind):
    problem = Problem("paper-cnn", kind)
    la = problem.fit(dim=6, complement=KFAC)
    P = la._subspace().projection
    for dim in (1, 4):
        again = problem.fit(projector=lambda _, d=dim: P.leading(d), dim=dim, complement=KFAC)
        assert close(problem.covariance(la.truncated(dim)), problem.covariance(again))
    again = problem.fit(projector=lambda _: P, dim=6, complement=KFAC, prior_precision=5.0)
    assert close(problem.covariance(la.with_prior(5.0)), problem.covariance(again))
    assert close(problem.covariance(la.with_prior(5.0).with_prior(PRIOR)), problem.covariance(la))


@pytest.mark.parametrize("kind", KINDS)
def test_the_evidence_has_the_determinant_of_the_whole_posterior(kind):
    problem = Problem("paper-cnn", kind)
    la = problem.fit(complement=KFAC)
    p = len(problem.ggn)
    for prior in (0.2, PRIOR, 4.0):
        psi = dense_complemented(problem, la.projection_matrix(), dense_outside(problem, "kfac", prior), prior)
        occam = 0.5 * (p * torch.log(torch.tensor(prior).double()) + torch.logdet(psi))
        full = problem.fit(projector="full", dim=None)
        full_occam = 0.5 * (
            p * torch.log(torch.tensor(prior).double()) - torch.logdet(problem.ggn + prior * torch.eye(p).double())
        )
        expected = full.log_marginal_likelihood(prior) - full_occam + occam
        assert float(la.log_marginal_likelihood(prior)) == pytest.approx(float(expected), rel=1e-9)
    hyper = [torch.tensor(0.3, dtype=torch.float64, requires_grad=True)]
    if kind == "regression":
        hyper.append(torch.tensor(0.6, dtype=torch.float64, requires_grad=True))
    assert torch.autograd.gradcheck(lambda *values: la.log_marginal_likelihood(*values), hyper)


def test_tuning_the_noise_equals_a_fit_with_it():
    problem = Problem("mlp", "regression")
    la = problem.fit(complement=KFAC)
    P = la._subspace().projection
    la.optimize_prior_precision(tune_noise=True)
    again = SubspaceLaplace(
        problem.model,
        Gaussian(la.noise_std),
        projector=lambda _: P,
        dim=5,
        complement=KFAC,
        prior_precision=la.prior_precision,
    ).fit(problem.batches)
    assert close(problem.covariance(la), problem.covariance(again))
    assert float(la.log_marginal_likelihood()) == pytest.approx(float(again.log_marginal_likelihood()), rel=1e-9)


@pytest.mark.parametrize("name", ["mlp", "layer-norm", "paper-cnn"])
def test_samples_have_the_covariance_of_the_posterior(name):
    """The samples are linear in the noise: unit noise gives a root of Ψ̃."""
    problem = Problem(name, "classification")
    la = problem.fit(complement=KFAC)
    root = la._state.posterior.sample(lambda width: torch.eye(width, dtype=torch.float64))
    expected = dense_complemented(problem, la.projection_matrix(), dense_outside(problem, "kfac"))
    assert close(root.T @ root, expected)
    assert la.sample(3).shape == (3, len(problem.ggn))
    assert la.functional_samples(problem.new, 2).shape[0] == 2


@pytest.mark.parametrize("dim", [0, 5])
@pytest.mark.parametrize("complement", ["kfac", "diagonal"])
def test_a_complement_is_saved_and_loaded(dim, complement, tmp_path):
    problem = Problem("layer-norm", "classification")
    la = problem.fit(dim=dim, complement=OUTSIDE[complement]) if dim else problem.fit_outside(complement)
    la.save(tmp_path / "saved")
    loaded = SubspaceLaplace.load(tmp_path / "saved", problem.model)
    assert loaded.dim == dim
    assert torch.equal(loaded.functional_covariance(problem.new), la.functional_covariance(problem.new))
    assert loaded.log_marginal_likelihood() == la.log_marginal_likelihood()
    assert repr(loaded) == repr(la)


@pytest.mark.parametrize("name", ["mlp", "paper-cnn", "transformer"])
def test_float32_agrees_to_four_digits(name):
    exact, rough = Problem(name, "classification"), Problem(name, "classification", torch.float32)
    fits = [problem.fit(complement=KFAC) for problem in (exact, rough)]
    P = fits[1]._subspace().projection
    expected = dense_complemented(exact, fits[1].projection_matrix(), dense_outside(exact, "kfac"))
    assert P.dim == 5
    assert close(rough.covariance(fits[1]), exact.jacobian @ expected @ exact.jacobian.T, 1e-4)


def test_a_complement_survives_a_killed_fit(tmp_path):
    problem = Problem("mlp", "classification")

    class Stopping:
        lives = 13

        def __iter__(self):
            for batch in problem.batches:
                self.lives -= 1
                if self.lives < 0:
                    raise KeyboardInterrupt
                yield batch

    options = {"likelihood": "classification", "dim": 5, "complement": KFAC, "prior_precision": PRIOR}
    expected = problem.fit(complement=KFAC).functional_covariance(problem.new)
    with pytest.raises(KeyboardInterrupt):
        SubspaceLaplace(problem.model, **options).fit(Stopping(), checkpoint=tmp_path / "kept")
    la = SubspaceLaplace(problem.model, **options).fit(problem.batches, checkpoint=tmp_path / "kept")
    assert torch.equal(la.functional_covariance(problem.new), expected)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("complement", OUTSIDE)
@pytest.mark.parametrize("name", SMALL)
def test_an_update_equals_a_fit_on_both_data_sets_in_the_same_subspace(name, complement, kind):
    problem = Problem(name, kind)
    options = {"complement": OUTSIDE[complement], "prior_precision": PRIOR, **problem.options}
    first = SubspaceLaplace(problem.model, dim=5, **options).fit(problem.batches[:1])  # 3 inputs, then 5
    P = first._subspace().projection
    updated = first.updated(problem.batches[1:])
    both = problem.fit(projector=lambda _: P, complement=OUTSIDE[complement])
    assert close(problem.covariance(updated), problem.covariance(both))
    assert not close(problem.covariance(first), problem.covariance(both), 1e-3)
    evidence = float(both.log_marginal_likelihood())
    assert float(updated.log_marginal_likelihood()) == pytest.approx(evidence, rel=1e-9)
    alone = SubspaceLaplace(problem.model, projector=None, **options).fit(problem.batches[:1])
    expected = problem.covariance(problem.fit_outside(complement))
    assert close(problem.covariance(alone.updated(problem.batches[1:])), expected)


def test_what_makes_no_sense_is_refused():
    problem = Problem("mlp", "classification")
    with pytest.raises(ValueError, match=r"projector=None leaves no uncertainty.*complement"):
        problem.fit(projector=None, dim=None)
    with pytest.raises(ValueError, match=r"dim has no effect: projector=None has no subspace"):
        problem.fit(projector=None, dim=5, complement=KFAC)
    for complement in (None, KFAC):
        with pytest.raises(ValueError, match=r"dim=0 leaves no subspace.*projector=None with complement"):
            problem.fit(dim=0, complement=complement)
    with pytest.raises(ValueError, match="Unknown complement 'full'"):
        problem.fit(complement="full")
    with pytest.raises(ValueError, match="nothing outside"):
        problem.fit(projector="full", dim=None, complement=KFAC)
    with pytest.raises(ValueError, match="'full' cannot be updated"):
        problem.fit(projector="full", dim=None).updated(problem.batches)
    for use in (
        lambda la: la.leading_traces(problem.new),
        lambda la: la.projection_matrix(),
        lambda la: la.truncated(1),
        lambda la: la.bounds(problem.new),
    ):
        with pytest.raises(ValueError, match="projector=None has no subspace"):
            use(problem.fit_outside("kfac"))


def test_a_prior_far_below_the_one_of_the_fit_warns_in_float32():
    problem = Problem("mlp", "classification", torch.float32)
    la = problem.fit(complement=KFAC, prior_precision=1e5)
    with pytest.warns(UserWarning, match="lost in rounding; fit again"):
        la.with_prior(1e-2)
