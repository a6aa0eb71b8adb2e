"""Where a rank stands: what every launcher has to tell it."""

from dataclasses import dataclass

LOOPBACK = "127.0.0.1"  # where ranks meet that are all on one host: no other host reaches it
PORT_FOLDER = "DDP_PORT_FOLDER"  # the variable that says where rank 0 writes the store's port


@dataclass(frozen=True)
class Place:
    """Where this process stands among the ranks, and where their store is.

    `port` is None in a Slurm step: there it is one of a few (`slurm.candidates`).
    """

    rank: int
    world_size: int
    local_rank: int
    address: str
    port: int | None = None
