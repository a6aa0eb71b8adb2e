"""Whether the ranks' models are still alike: compares the norms that each rank sends at a save.

Replicas start alike and get the same averaged gradients, so they stay alike; where they do not,
rank 0's are saved and returned, and nothing else says that the others trained something else.
Norms and not a digest: on different kinds of processors the last bits may differ.
"""

import math

from ddp_common.messages import ParameterNorms

TOLERANCE = 1e-5  # relative: float32 has 1e-7
KEPT = 50  # saves of which the norms of some ranks have not arrived yet


class Replicas:
    """The norms of each save, until those of all ranks have arrived."""

    def __init__(self, world_size: int):
        self.world_size = world_size
        # By checkpoint and step, then by rank
        self.pending: dict[tuple[str, int], dict[int, ParameterNorms]] = {}

    def take(self, rank: int, message: ParameterNorms) -> str | None:
        """Take in the norms of a rank; returns a sentence if the ranks have drifted apart."""
        save = message.checkpoint, message.step
        by_rank = self.pending.setdefault(save, {})
        by_rank.setdefault(rank, message)  # the first, where one step is saved twice
        if len(by_rank) == self.world_size:
            return _apart(self.pending.pop(save))
        if len(self.pending) > KEPT:  # where not all ranks save
            self.pending.pop(next(iter(self.pending)))
        return None


def _apart(by_rank: dict[int, ParameterNorms]) -> str | None:
    first = by_rank[0]
    for rank in sorted(by_rank):
        for name, here, there in zip(first.names, first.norms, by_rank[rank].norms):
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
