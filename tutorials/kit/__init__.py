"""What the course needs and one's own training does not.

The commands behind `make run` and `make data`, the settings of a tutorial, and the data sets. A
tutorial imports it as `from tutorials import kit`. It builds on `ddp_common`, which knows nothing
of it.
"""

from tutorials.kit.contents import read_idx
from tutorials.kit.datasets import fetch
from tutorials.kit.parameters import launch_options, original, settings

__all__ = ["fetch", "launch_options", "original", "read_idx", "settings"]
