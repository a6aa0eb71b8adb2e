"""The first thing that a worker's own forkserver imports: it leaves a guard, and imports torch.

`multiprocessing` gives no other way to run something there. Nothing else may import this module.
"""

from ddp_common.worker.guard import leave_a_guard
from ddp_common.worker.imports import import_what_ranks_need

leave_a_guard()
import_what_ranks_need()
