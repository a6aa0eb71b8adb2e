"""The moments between two batches at which a checkpoint loses nothing.

Gradients of several batches may be added up for one step of an optimizer. No `state_dict` holds
them, so a checkpoint between these batches would lose them. At a *boundary* each optimizer of the
checkpoint has used its gradients, and the batch that was taken last has been trained on. Relies on
the hook that torch calls after each step of any optimizer, on the count of changes that each
tensor has, and on `GradScaler.update`, which ends a step that infinite gradients skip.
"""

import functools
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

# Of all optimizers of this process: a part may leave the step to another one that it is made of
_steps = 0
_stepped: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()  # since a batch was taken


class Boundaries:
    """Of the optimizers and scalers among `parts`; without an optimizer all is a boundary."""

    def __init__(self, parts: Iterable[Any]):
        parts = list(parts)
        self._optimizers = [part for part in parts if isinstance(part, torch.optim.Optimizer)]
        self._scalers = [part for part in parts if isinstance(part, torch.amp.GradScaler)]
        self._is_in_batch = False
        self._steps_before = 0  # the batch
        self._open_before = self._open_steps()
        if self._optimizers:
            _watch_steps()

    def batch_taken(self) -> None:
        """Training takes a batch."""
        self._is_in_batch = True
        self._steps_before = _steps
        self._open_before = self._open_steps()
        _stepped.clear()

    def batch_is_over(self) -> None:
        """What training does with the batch, it has done, be it no step at all."""
        self._is_in_batch = False

    def restored(self) -> None:
        """A position was loaded: no batch was taken since then."""
        self._is_in_batch = False
        for optimizer in self._optimizers:
            _gradients_are_used(optimizer)

    def is_reached(self) -> bool:
        """Whether this moment is a boundary."""
        now = self._open_steps()
        if any(now):  # between scaler.step() and scaler.update()
            return False
        for after, before in zip(now, self._open_before):
            if after is not before:  # the scaler was updated, which has ended these steps
                for optimizer in self._optimizers:
                    if id(optimizer) in (before or {}):
                        _note_step(optimizer)
        self._open_before = now
        return not self._is_before_training() and not self.with_unused_gradients()

    def _is_before_training(self) -> bool:
        return bool(self._optimizers) and self._is_in_batch and _steps == self._steps_before

    def with_unused_gradients(self) -> list[torch.optim.Optimizer]:
        """The optimizers that have gradients, other than 0, which no step has used as they are."""
        return [each for each in self._optimizers if any(map(_is_unused, _gradients(each)))]

    def _open_steps(self) -> list[dict | None]:
        """Of each scaler, what it knows of steps in progress: `update` makes it a new dict.

        Its keys are the ids of optimizers. None for a scaler that is switched off, which leaves
        all steps to the optimizer.
        """
        return [getattr(scaler, "_per_optimizer_states", None) for scaler in self._scalers]


@functools.cache
def _watch_steps() -> None:
    register_optimizer_step_post_hook(_note_step)


@torch._disable_dynamo  # a step that is compiled would be compiled again for each count
def _note_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    global _steps
    _steps += 1
    _stepped.add(optimizer)
    # Those that have stepped before, for the same batch: what they have got since then is not for
    # a step. The loss of a GAN's generator, for one, goes through its discriminator.
    for each in _stepped:
        _gradients_are_used(each)


def _gradients_are_used(optimizer: torch.optim.Optimizer) -> None:
    for gradient in _gradients(optimizer):
        # It goes with the gradient: a new one has none. To keep gradients would cost memory.
        gradient.ddp_changes_at_step = gradient._version  # type: ignore[attr-defined]


def _is_unused(gradient: torch.Tensor) -> bool:
    if getattr(gradient, "ddp_changes_at_step", None) == gradient._version:
        return False
    values = gradient.coalesce().values() if gradient.is_sparse else gradient
    return bool(values.any())


def _gradients(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                yield parameter.grad
