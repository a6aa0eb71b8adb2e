"""Lets `import torchvision` work beside a torch without CUDA.

The Linux wheels of torchvision on PyPI are built for CUDA. Beside a CPU-only torch their compiled
operators cannot be loaded, and `import torchvision` stops at `operator torchvision::nms does not
exist`. Models, transforms and data sets need none of those operators: it is enough that two
schemas exist.

This is an entry point of the group `torch.backends`: torch calls it at the end of `import torch`.
"""

import importlib.util
from pathlib import Path

_library = None  # the declared schemas live as long as this object


def declare_missing_operators() -> None:
    """Declare the operators that torchvision expects, if its compiled ones cannot be loaded.

    Never raises.
    """
    import torch  # not at the top: torch itself imports this module

    global _library
    if torch.version.cuda is not None or _library is not None:
        return
    torchvision = importlib.util.find_spec("torchvision")
    if torchvision is None or torchvision.origin is None:
        return
    try:
        for path in Path(torchvision.origin).parent.glob("_C*"):
            torch.ops.load_library(str(path))
    except OSError:  # built against CUDA libraries that this torch does not have
        _library = torch.library.Library("torchvision", "FRAGMENT")
        for name in ("nms", "qnms"):
            _library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
