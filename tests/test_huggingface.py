"""Small Hugging Face models made from a configuration: dict inputs, attention masks, `.logits`, position embeddings."""

import pytest
import torch
from dense_reference import dense_jacobian
from test_laplace import PRIOR, close, labels, loader, precision_matrix, subspace_covariance

from sublaplace import Linearization, SubspaceLaplace

transformers = pytest.importorskip("transformers")


def bert():
    config = transformers.BertConfig(
        vocab_size=20,
        hidden_size=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=12,
        max_position_embeddings=10,
        num_labels=3,
    )
    return transformers.BertForSequenceClassification(config)


def gpt2():
    config = transformers.GPT2Config(
        vocab_size=20, n_embd=8, n_layer=2, n_head=2, n_positions=10, num_labels=3, pad_token_id=0
    )
    return transformers.GPT2ForSequenceClassification(config)


def batch(n: int, seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, 20, (n, 6), generator=generator)
    lengths = torch.randint(3, 7, (n, 1), generator=generator)
    mask = (torch.arange(6) < lengths).long()
    return {"input_ids": ids * mask, "attention_mask": mask}


@pytest.mark.parametrize("build", [bert, gpt2])
def test_jacobian_and_covariance_equal_brute_force(build):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = build().double().eval()
    inputs, new = batch(6), batch(3, seed=1)
    linearization = Linearization(model)
    expected = dense_jacobian(model, new)
    assert close(linearization.jacobian(new).dense_rows(), expected, 1e-10)
    assert linearization.unusual_parameters() == {}
    la = SubspaceLaplace(model, "classification", dim=5, prior_precision=PRIOR).fit(
        loader(inputs, labels(model, inputs))
    )
    covariance = subspace_covariance(expected, la.projection, precision_matrix(model, inputs))
    assert close(la.functional_covariance(new, joint=True), covariance, 1e-8)
