"""The classifier of texts: a small BERT, LoRA adapters and a linear head."""

import copy
from collections.abc import Callable
from typing import Any, cast

from torch import Tensor, nn

PADDING = 0
LENGTH = 40  # tokens; 95 % of the snippets have no more
WIDTH = 64
RANK = 8


class TextClassifier(nn.Module):
    """A classifier of token numbers (n, length): a BERT, the mean over the tokens without padding, a linear head."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body
        self.head = nn.Linear(WIDTH, 2)

    def hidden(self, tokens: Tensor) -> Tensor:
        """Return what the body makes of each token (n, length, width)."""
        found: Tensor = self.body(input_ids=tokens, attention_mask=(tokens != PADDING).long()).last_hidden_state
        return found

    def classes(self, hidden: Tensor, tokens: Tensor) -> Tensor:
        """Return the logits (n, 2) from what the body made of the tokens."""
        present = (tokens != PADDING)[:, :, None].to(hidden.dtype)
        logits: Tensor = self.head((hidden * present).sum(1) / present.sum(1))
        return logits

    def forward(self, tokens: Tensor) -> Tensor:
        return self.classes(self.hidden(tokens), tokens)


def base_classifier(num_tokens: int) -> TextClassifier:
    """Build the classifier without adapters."""
    from transformers import BertConfig, BertModel

    settings: dict[str, Any] = {
        "vocab_size": num_tokens,
        "hidden_size": WIDTH,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 4 * WIDTH,
        "max_position_embeddings": LENGTH,
        "pad_token_id": PADDING,
        "attn_implementation": "eager",
    }
    return TextClassifier(BertModel(BertConfig(**settings), add_pooling_layer=False))


def with_adapters(base: nn.Module) -> TextClassifier:
    """Build a classifier on a copy of the base. Adapters and head are new, and only they require grad."""
    from peft import LoraConfig, get_peft_model

    assert isinstance(base, TextClassifier)
    adapters = LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules=["query", "value"])
    return TextClassifier(cast(Callable[..., nn.Module], get_peft_model)(copy.deepcopy(base.body), adapters))


def adapted_classifier(num_tokens: int) -> TextClassifier:
    """Build the classifier with adapters, for weights that are loaded into it."""
    return with_adapters(base_classifier(num_tokens))
