"""Training an independent drafter (D3D): any language model of the target's tokenizer, its replies.

The target itself is not run: only the tokens of its replies matter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from draftwood.draft.independent_checkpoint import network_from_model
from draftwood.draft.independent_network import IndependentNetwork
from draftwood.train.anchors import Example, anchor_range
from draftwood.train.target_side import ResponseRow, as_example


@dataclass(frozen=True)
class IndependentRecipe:
    """The choices that make an independent drafter.

    Attributes:
        mask_token_id: an unused special token.
        layers: kept layers of the body, None for all; negative ones count from the end.
        block_size: rows of a block, anchor included.
        borrows: embeddings and head are the target's, frozen and not saved. The body must be the
            target.
        pretrained: start from the body's weights; False draws them anew, for comparison.
        tokenizer: ``fingerprint`` of the tokenizer; None if unknown.
        seed: of random weights.
        markov_rank: width of a Markov head, 0 for none.
    """

    mask_token_id: int
    layers: tuple[int, ...] | None = None
    block_size: int = 16
    borrows: bool = False
    pretrained: bool = True
    tokenizer: str | None = None
    seed: int = 0
    markov_rank: int = 0

    @property
    def can_sample_head(self) -> bool:
        return True


def build_independent(body: nn.Module, recipe: IndependentRecipe) -> IndependentNetwork:
    """The untrained drafter, in float32 on the body's device.

    Args:
        body: a transformers causal LM; where the recipe borrows, the target.

    Raises:
        ValueError: a body of another family, a layer it lacks, or a mask token that it uses.
    """
    config = body.config
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        value = getattr(config, name, None)
        if recipe.mask_token_id in (value if isinstance(value, list) else [value]):
            raise ValueError(
                f"mask_token_id {recipe.mask_token_id} is the body's {name}; choose a special "
                "token that its text never contains"
            )
    network = network_from_model(
        body,
        block_size=recipe.block_size,
        mask_token_id=recipe.mask_token_id,
        layers=recipe.layers,
        borrows=recipe.borrows,
        pretrained=recipe.pretrained,
        tokenizer=recipe.tokenizer,
        seed=recipe.seed,
        markov_rank=recipe.markov_rank,
    ).float()
    if recipe.borrows:
        inputs = body.get_input_embeddings().weight  # type: ignore[operator]
        outputs = body.get_output_embeddings().weight  # type: ignore[operator]
        network.borrow(inputs.float(), outputs.float())
    return network


class TokenSource:
    """Training responses of which only the tokens are read."""

    def __init__(self, rows: Sequence[ResponseRow]) -> None:
        self._rows = list(rows)

    def refresh(self) -> None:
        """Nothing to take in: the rows are given."""

    def __len__(self) -> int:
        return len(self._rows)

    def num_anchors(self, index: int) -> int:
        row = self._rows[index]
        return anchor_range(row.response_start, len(row.token_ids))[1]

    def name(self, index: int) -> str:
        return self._rows[index].key

    def example(self, index: int) -> Example:
        return as_example(self._rows[index])
