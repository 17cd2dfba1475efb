"""The training loop: steps, evaluation, checkpoints and exact resume."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from draftwood.draft.network import DraftNetwork
from draftwood.errors import DraftwoodError
from draftwood.train.accepted import CHAIN
from draftwood.train.anchors import Example
from draftwood.train.batches import Batches, ExampleSource
from draftwood.train.evaluate import Acceptance, evaluate
from draftwood.train.networks import Network, device_of, save_network
from draftwood.train.objective import BlockObjective, Objective
from draftwood.train.state import (
    HeardLog,
    Progress,
    RunLog,
    latest_checkpoint,
    load_checkpoint,
    save_checkpoint,
)
from draftwood.train.train_config import TrainConfig

DRAFT = "draft"
"""Folder of the drafter inside that of its run."""


@dataclass
class _Window:
    """Steps since the last log record, their time, and the positions before them."""

    begin: int
    steps: list[dict[str, float]] = field(default_factory=list)
    seconds: float = 0.0


class Trainer:
    """Trains one drafter in one process or in several (pass an ``accelerate.Accelerator``)."""

    def __init__(
        self,
        network: DraftNetwork | Objective,
        source: ExampleSource,
        validation: Callable[[], list[Example]],
        folder: Path,
        config: TrainConfig,
        accelerator: Any = None,
    ) -> None:
        """Prepare a run in ``folder`` and resume it if it has a checkpoint.

        Args:
            network: drafter with embeddings (own or borrowed) and its objective; a DFlash network
                alone is trained for ``config.loss``.
            source: training responses.
            validation: loads the held-out responses; called at each evaluation.
            folder: checkpoints, logs and the ``draft`` folder in loadable form.
            accelerator: for devices, mixed precision and several processes.
        """
        task = network if isinstance(network, Objective) else BlockObjective(network, config.loss)
        if config.head_negatives and not task.can_sample_head:
            raise ValueError("head_negatives needs a drafter with a head of its own; set it to 0")
        self.config, self.folder, self.validation = config, folder, validation
        self.task, self.network = task, task.network
        self.accelerator = accelerator
        self.rank = accelerator.process_index if accelerator else 0
        self.world = accelerator.num_processes if accelerator else 1
        self.device = accelerator.device if accelerator else device_of(self.network)
        self.batches = Batches(
            source, task, config, rank=self.rank, world=self.world, device=self.device
        )
        self.schedule = config.schedule()
        self.progress = Progress()
        task.train_tables(config.train_head)
        self.objective: Any = task
        self.parameters = [p for p in self.network.parameters() if p.requires_grad]
        self.optimizer: Any = torch.optim.AdamW(
            _groups(self.network, config.weight_decay),
            lr=config.learning_rate,
            betas=config.betas,
            fused=True,
        )
        self.average = {k: v.clone() for k, v in self.network.state_dict().items()}
        resumed = self._resume()
        if accelerator:
            self.objective, self.optimizer = accelerator.prepare(self.objective, self.optimizer)
        self.log: RunLog | HeardLog | None = (
            RunLog(folder, step=self.progress.step if resumed else None) if self.rank == 0 else None
        )

    def _block_size(self) -> int:
        full = self.network.config.block_size
        done = self.schedule.progress(self.progress.step, self.progress.elapsed_s)
        if self.config.short_block and done < self.config.short_share:
            return min(self.config.short_block, full)
        return full

    # -- one step --------------------------------------------------------------------------

    def step(self) -> dict[str, float]:
        """One optimizer step; returns what happened.

        Raises:
            DraftwoodError: the loss is not finite; nothing was updated or saved since.
        """
        rate = self.schedule.rate(self.progress.step, self.progress.elapsed_s)
        block_size = self._block_size()
        parts = [
            self.batches.draw(self.progress, block_size) for _ in range(self.config.accumulate)
        ]
        loss = first = counted = 0.0
        for batch, head, names in parts:
            total, weight, correct, seen = self.objective(batch, head)
            part = total / weight.clamp_min(1e-6) / len(parts)
            if not bool(torch.isfinite(part)):
                raise DraftwoodError(
                    f"loss is {float(part.detach())} at step {self.progress.step} on responses "
                    f"{names}; the last good checkpoint in {self.folder} is kept. Check their "
                    "features, or lower the learning rate and resume"
                )
            self.accelerator.backward(part) if self.accelerator else part.backward()
            loss += float(part.detach())
            first += float(correct[0] / seen[0].clamp_min(1)) / len(parts)
            counted += float(seen.sum())
        norm = float(torch.nn.utils.clip_grad_norm_(self.parameters, self.config.clip))
        if not np.isfinite(norm):
            raise DraftwoodError(
                f"the gradient is not finite at step {self.progress.step} on responses "
                f"{'; '.join(names for _, _, names in parts)}; lower the learning rate and resume"
            )
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.progress.step += 1
        self.progress.positions += int(counted) * self.world
        self._update_average()
        return {"loss": loss, "first_accuracy": first, "grad_norm": norm, "learning_rate": rate}

    def _update_average(self) -> None:
        decay = self.config.ema_decay
        if not decay:
            return
        # a young average follows closely: it would otherwise remember the start
        share = 1 - min(decay, (1 + self.progress.step) / (10 + self.progress.step))
        for name, value in self.network.state_dict().items():
            if value.is_floating_point():
                self.average[name].lerp_(value.to(self.average[name].device), share)

    # -- the run ---------------------------------------------------------------------------

    def run(self, *, evaluate_first: bool = False) -> dict[str, Acceptance]:
        """Train to the end of the schedule; evaluate and save on the way and at the end.

        Args:
            evaluate_first: also before the first step: what there is to improve on.
        """
        config, progress = self.config, self.progress
        self._record("start", {"config": asdict(config), "responses": len(self.batches.source)})
        if evaluate_first and progress.step == 0:
            self.evaluate()
        evaluated = saved = progress.elapsed_s
        window = _Window(progress.positions)
        while self.schedule.progress(progress.step, progress.elapsed_s) < 1.0:
            begin = time.monotonic()
            window.steps.append(self.step())
            seconds = self._agreed(time.monotonic() - begin)
            progress.elapsed_s += seconds
            window.seconds += seconds
            if len(window.steps) >= config.log_steps:
                window = self._log(window)
            if progress.elapsed_s - evaluated > 60 * config.eval_minutes:
                self.evaluate()
                evaluated = progress.elapsed_s
            if progress.elapsed_s - saved > 60 * config.save_minutes:
                window = self._log(window)  # the steps since belong to what is saved
                self.save()
                saved = progress.elapsed_s
        self._log(window)
        self.save()
        return self.evaluate()

    def _log(self, window: _Window) -> _Window:
        """Record the means of some steps, if there are any; an empty window follows."""
        progress = self.progress
        if window.steps:
            means = {k: float(np.mean([w[k] for w in window.steps])) for k in window.steps[0]}
            speed = (progress.positions - window.begin) / max(window.seconds, 1e-9)
            state = {"positions_per_s": speed, "block_size": float(self._block_size())}
            self._record("train", {**means, **state, **asdict(progress)})
        return _Window(progress.positions)

    def _agreed(self, seconds: float) -> float:
        """The slowest process's time, so that all follow one schedule."""
        if self.world == 1:
            return seconds
        value = torch.tensor([seconds], device=self.device)
        return float(self.accelerator.gather(value).max())

    def evaluate(self) -> dict[str, Acceptance]:
        """Offline acceptance on the held-out responses; also writes the ``draft`` folder."""
        if self.rank != 0:
            return {}
        weights = self.weights()
        network = self.network
        kept = {k: v.clone() for k, v in network.state_dict().items()}
        network.load_state_dict(weights)
        network.eval()
        result = evaluate(network, self.validation(), (CHAIN, 8, 32, 128))
        network.load_state_dict(kept)
        network.train()
        for domain, found in result.items():
            taus = {f"tau_{b or 'chain'}": found.tau(b) for b in found.num_cycles}
            accuracy = {f"accuracy_{i + 1}": a for i, a in enumerate(found.accuracy)}
            about = {"domain": domain, "tokens": found.num_tokens, **taus, **accuracy}
            self._record("eval" if domain == "all" else f"eval/{domain}", about)
        save_network(self.folder / DRAFT, network, weights)
        return result

    def weights(self) -> dict[str, torch.Tensor]:
        """The weights to ship: the moving average, or the current ones without it."""
        return dict(self.average) if self.config.ema_decay else self.network.state_dict()

    def _record(self, kind: str, values: dict[str, Any]) -> None:
        if self.log is not None:
            self.log.write(kind, self.progress.step, values)

    # -- resume ----------------------------------------------------------------------------

    def save(self) -> None:
        """Write a checkpoint from which the run continues exactly."""
        if self.rank != 0:
            return
        state = {
            "network": self.network.state_dict(),
            "average": self.average if self.config.ema_decay else None,
            "optimizer": self.optimizer.state_dict(),
            "progress": asdict(self.progress),
        }
        save_checkpoint(self.folder, state, self.progress.step)

    def _resume(self) -> bool:
        """Whether there was something to go on with."""
        file = latest_checkpoint(self.folder)
        if file is None:
            return False
        state = load_checkpoint(file)
        self.network.load_state_dict(state["network"])
        if state["average"] is not None:
            self.average = state["average"]
        self.optimizer.load_state_dict(state["optimizer"])
        self.progress = replace(self.progress, **state["progress"])
        planned, now = self.progress.num_records, len(self.batches.source)
        if planned > now:
            raise ValueError(
                f"the run in {self.folder} was planned with {planned} replies, now there are "
                f"{now}; restore the others, or choose another folder"
            )
        return True


def _groups(network: Network, weight_decay: float) -> list[dict[str, Any]]:
    """Norm weights are not decayed."""
    parameters = [p for p in network.parameters() if p.requires_grad]
    return [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0},
    ]
