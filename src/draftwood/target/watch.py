"""Whether modules still compute what was read from them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn


class Watch:
    """Notices when modules would no longer compute what was read from them at first.

    Args:
        roots: watched with all their parts. Hooks of the roots themselves keep running and are
            nobody's business here.
    """

    def __init__(self, roots: Sequence[nn.Module]) -> None:
        self._roots = list(roots)
        parts = [part for root in roots for part in root.modules() if part is not root]
        self._hooks = [part._forward_hooks for part in parts]
        self._hooks += [part._forward_pre_hooks for part in parts]
        parameters = {id(p): p for root in roots for p in root.parameters()}
        # Tensors made in inference mode do not count their changes.
        self._parameters = [p for p in parameters.values() if not p.is_inference()]
        self._stamps = self._current_stamps()

    def _current_stamps(self) -> list[tuple[int, int]]:
        return [(p.data_ptr(), p._version) for p in self._parameters]

    def is_unchanged(self) -> bool:
        """Same weights, evaluation mode, no hooks inside, no gradients or autocast wanted.

        A change through ``parameter.data`` that stays in place cannot be noticed.
        """
        return (
            not torch.is_grad_enabled()
            and not torch.is_autocast_enabled("cpu")
            and not any(root.training for root in self._roots)
            and not any(self._hooks)
            and self._stamps == self._current_stamps()
        )
