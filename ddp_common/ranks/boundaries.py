"""The moments between two batches at which a checkpoint loses nothing.

Gradients of several batches may be added up for one step of an optimizer. No `state_dict` holds
them, so a checkpoint between these batches would lose them. At a *boundary* an optimizer has
stepped since training took the last batch, and none has got gradients that it has not used.
Relies on the hooks that torch calls after each step, on the count of changes that each tensor has,
and on `GradScaler.update`, which ends a step that infinite gradients skip.
"""

from collections.abc import Iterable
from typing import Any

import torch

# Of the optimizers of all checkpoints of this process: those of two may step in turns
_steps = 0


class Boundaries:
    """Of the optimizers and scalers among `parts`; without an optimizer all is a boundary."""

    def __init__(self, parts: Iterable[Any]):
        parts = list(parts)
        self._optimizers = [part for part in parts if isinstance(part, torch.optim.Optimizer)]
        self._scalers = [part for part in parts if isinstance(part, torch.amp.GradScaler)]
        self._steps_before: int | None = None  # the last batch; None if none was taken
        self._stepped: set[torch.optim.Optimizer] = set()  # since then
        self._open_before = self._open_steps()
        for optimizer in self._optimizers:
            optimizer.register_step_post_hook(self._note_step)

    def _note_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        global _steps
        _steps += 1
        self._stepped.add(optimizer)
        for gradient in _gradients(optimizer):
            # It goes with the gradient: a new one has none. To keep gradients would cost memory.
            gradient.ddp_changes_at_step = gradient._version  # type: ignore[attr-defined]

    def batch_taken(self, is_of_own_sampler: bool) -> None:
        """Training takes a batch, of the sampler that the checkpoint listens to or of another."""
        if is_of_own_sampler:
            self._steps_before = _steps
        self._stepped.clear()
        self._open_before = self._open_steps()

    def restored(self) -> None:
        """A position was loaded: no batch was taken since then."""
        self._steps_before = None

    def is_reached(self) -> bool:
        """Whether this moment is a boundary."""
        if not self._optimizers or self._steps_before is None:
            return True
        now = self._open_steps()
        if any(now):  # between scaler.step() and scaler.update()
            return False
        for after, before in zip(now, self._open_before):
            if after is not before:  # the scaler was updated, which has ended these steps
                skipped = [each for each in self._optimizers if id(each) in (before or {})]
                self._stepped.update(skipped)
        has_trained = _steps > self._steps_before or len(self._stepped) > 0
        return has_trained and not any(
            _has_unused_gradients(optimizer)
            for optimizer in self._optimizers
            if optimizer not in self._stepped
        )

    def _open_steps(self) -> list[dict | None]:
        """Of each scaler, what it knows of steps in progress: `update` makes it a new dict.

        Its keys are the ids of optimizers. None for a scaler that is switched off, which leaves
        all steps to the optimizer.
        """
        return [getattr(scaler, "_per_optimizer_states", None) for scaler in self._scalers]


def _gradients(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [
        parameter.grad
        for group in optimizer.param_groups
        for parameter in group["params"]
        if parameter.grad is not None
    ]


def _has_unused_gradients(optimizer: torch.optim.Optimizer) -> bool:
    """Whether it has gradients that its last step has not used as they are."""
    return any(
        getattr(gradient, "ddp_changes_at_step", None) != gradient._version
        for gradient in _gradients(optimizer)
    )
