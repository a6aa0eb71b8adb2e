"""Whether the ranks' models are still alike: the norms that each rank tells at a save, compared.

Replicas start alike and get the same averaged gradients, so they stay alike; where they do not,
rank 0's are saved and returned, and nothing else says that the others trained something else.
Norms and not a digest: on different kinds of processors the last bits may differ.
"""

import math

from ddp_common.messages import ParameterNorms

TOLERANCE = 1e-5  # relative: float32 has 1e-7
KEPT = 50  # saves of which some ranks have not told yet


class Replicas:
    """What the ranks have told, until all have told it."""

    def __init__(self, world_size: int):
        self.world_size = world_size
        # By checkpoint and step, then by rank
        self.told: dict[tuple[str, int], dict[int, ParameterNorms]] = {}

    def take(self, rank: int, message: ParameterNorms) -> str | None:
        """Take in what a rank tells; returns a sentence if the ranks have drifted apart."""
        save = message.checkpoint, message.step
        told = self.told.setdefault(save, {})
        told.setdefault(rank, message)  # the first, where one step is saved twice
        if len(told) == self.world_size:
            return _apart(self.told.pop(save))
        if len(self.told) > KEPT:  # where not all ranks save
            self.told.pop(next(iter(self.told)))
        return None


def _apart(told: dict[int, ParameterNorms]) -> str | None:
    first = told[0]
    for rank in sorted(told):
        for name, here, there in zip(first.names, first.norms, told[rank].norms):
            both_diverged = math.isnan(here) and math.isnan(there)
            if not both_diverged and not math.isclose(here, there, rel_tol=TOLERANCE):
                return (
                    f"The models of the ranks have drifted apart: after step {first.step} the "
                    f"parameter {name} has the norm {here:.6g} on rank 0 and {there:.6g} on rank "
                    f"{rank}. Rank 0's is saved, and the others train something else. DDP "
                    "averages the gradients of its own forward pass, for parameters that had "
                    "requires_grad=True when it was made: call the wrapped model, not the one "
                    "inside; wrap it again after unfreezing; have schedules step by a value that "
                    "is the same on all ranks."
                )
    return None
