"""The moments between two batches at which a checkpoint loses nothing.

Gradients of several batches may be added up for one step of an optimizer. No `state_dict` holds
them, so a checkpoint between these batches would lose them. A *boundary* is a moment at which an
optimizer has stepped since training took its last batch. Relies on the hooks that torch calls
after each step, and on `GradScaler.update`, which ends a step that infinite gradients skip.
"""

from collections.abc import Iterable
from typing import Any

import torch


class Boundaries:
    """Of the optimizers and scalers among `parts`; without an optimizer all is a boundary."""

    def __init__(self, parts: Iterable[Any]):
        parts = list(parts)
        self._optimizers = [part for part in parts if isinstance(part, torch.optim.Optimizer)]
        self._scalers = [part for part in parts if isinstance(part, torch.amp.GradScaler)]
        self._has_stepped = True  # since the last batch; also if none was taken
        self._open_before = self._open_steps()
        for optimizer in self._optimizers:
            optimizer.register_step_post_hook(self._note_step)

    def _note_step(self, *_: Any) -> None:
        self._has_stepped = True

    def batch_taken(self) -> None:
        """Training takes a batch."""
        self._has_stepped = not self._optimizers
        self._open_before = self._open_steps()

    def restored(self) -> None:
        """A position was loaded: no batch was taken since then."""
        self._has_stepped = True

    def is_reached(self) -> bool:
        """Whether this moment is a boundary."""
        now = self._open_steps()
        if any(now):  # between scaler.step() and scaler.update()
            return False
        was_updated = any(after is not before for after, before in zip(now, self._open_before))
        return self._has_stepped or was_updated

    def _open_steps(self) -> list[dict | None]:
        """Of each scaler, what it knows of steps in progress: `update` makes it a new dict.

        None for a scaler that is switched off, which leaves all steps to the optimizer.
        """
        return [getattr(scaler, "_per_optimizer_states", None) for scaler in self._scalers]
