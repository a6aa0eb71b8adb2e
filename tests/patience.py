"""How long a test waits for what takes a second: as long as a busy machine may need for it.

Every time-out of a test is a multiple of `PATIENCE`. A test waits for events, so a long one costs
nothing where all is well. DDP_PATIENCE gives a slow machine more.
"""

import os

PATIENCE = float(os.environ.get("DDP_PATIENCE", 60))  # seconds
