"""Paper, colours, brushes and a camera: what the programs that draw pictures share.

These are the files data/*/draw.py, which draw stand-ins for photographs. A `Sheet` is three times
as large as the picture will be. The program paints on it from the back to the front, and decides
by lot where things stand and which colour they have. At last the sheet is `photographed`: reduced,
which makes its edges smooth, and seen in some light through some lens.

A point is a complex number. Where it lies on the paper is a matter of the sheet: one program
measures in metres, the other in hundredths of the picture's width. A colour is three bytes: red,
green, blue.

Promises: a picture depends on its name and its size and on nothing else. Every call gives the
same bytes; so do other machines of the same kind with the same versions of Pillow and NumPy.
Needs no fonts, no files, no network, and nothing of `ddp_common`.
"""

import argparse
import cmath
import os
import random
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFilter

FINER = 3  # a sheet has so many times the width of the picture
polar = cmath.rect  # polar(length, angle): the point so far away in that direction


def lighter(colour, more):
    """`colour` with `more` added to each channel; less than 0 makes it darker."""
    return tuple(max(0, min(255, channel + more)) for channel in colour)


def darker(colour, share):
    """The `share` of the colour's light that is left, from 0 to 1."""
    return tuple(int(channel * share) for channel in colour)


def mixed(colour, other, share):
    """`colour` with a `share` of the `other`, from 0 to 1."""
    return tuple(round(a * (1 - share) + b * share) for a, b in zip(colour, other))


class Sheet:
    """A sheet of paper with a pen and a source of random numbers of its own.

    `size` is the width of the picture in pixels, `canvas` that of the paper. A kind of sheet sets
    `unit`, the pixels of the paper in one unit of length, and says with `at` where a point lies.
    A brush that is given the `pen` of another layer paints on that.
    """

    def __init__(self, name, size):
        self.random = random.Random(name)  # seeded by the text itself: the same in every process
        self.uniform = self.random.uniform
        self.choice = self.random.choice
        self.size = size
        self.canvas = FINER * size
        self.image = self.layer((0, 0, 0))
        self.pen = ImageDraw.Draw(self.image)

    def layer(self, colour):
        """Another paper of the same size."""
        return Image.new("RGB", (self.canvas, self.canvas), colour)

    def chance(self, share):
        """True in this share of all cases."""
        return self.random.random() < share

    def tint(self, colour, by=10):
        """A colour near `colour`: its light differs by up to `by`, a channel by a third."""
        brightness = self.uniform(-by, by)
        channels = (channel + brightness + self.uniform(-by, by) / 3 for channel in colour)
        return tuple(max(0, min(255, round(channel))) for channel in channels)

    def fill(self, colour):
        self.pen.rectangle((0, 0, self.canvas, self.canvas), colour)

    def polygon(self, points, colour, pen=None):
        (pen or self.pen).polygon([self.at(point) for point in points], colour)

    def line(self, points, width, colour, pen=None):
        pixels = max(1, round(width * self.unit))
        (pen or self.pen).line([self.at(point) for point in points], colour, pixels, "curve")

    def oval(self, centre, wide, high, colour, pen=None):
        """An ellipse with the half axes `wide` and `high`."""
        x, y = self.at(centre)
        wide *= self.unit
        high *= self.unit
        (pen or self.pen).ellipse((x - wide, y - high, x + wide, y + high), colour)

    def disc(self, centre, radius, colour, pen=None):
        self.oval(centre, radius, radius, colour, pen)


@dataclass(frozen=True)
class Camera:
    """How far the photographs of a set differ. Each has values of its own in these bounds."""

    blur: float  # the largest, in pixels of a picture that is 64 wide
    patches: int  # of light and shade along an edge of the picture
    unevenness: float  # the standard deviation of their light, as a share of it
    exposure: tuple  # the least and the most light, 1 is that of the drawing
    haze: float  # the most that is added to every pixel, of 255
    contrast: tuple  # the least and the most
    noise: tuple  # the least and the largest standard deviation of the sensor's noise, of 255


def photographed(sheet, camera):
    """The drawing as a camera sees it: uint8 of the shape (size, size, 3)."""
    blur = sheet.uniform(0.0, camera.blur) * sheet.size / 64
    image = sheet.image.reduce(FINER).filter(ImageFilter.GaussianBlur(blur))
    noise = np.random.default_rng(sheet.random.getrandbits(64))

    shades = noise.normal(1, camera.unevenness, (camera.patches, camera.patches))
    shades = Image.fromarray(shades.astype(np.float32))
    shades = np.asarray(shades.resize((sheet.size, sheet.size), Image.Resampling.BICUBIC))

    exposure = sheet.uniform(*camera.exposure)
    colour = np.array([1 + sheet.uniform(-0.09, 0.09), 1, 1 + sheet.uniform(-0.12, 0.12)])
    light = (exposure * colour).astype(np.float32)
    haze = sheet.uniform(0, camera.haze)
    contrast = sheet.uniform(*camera.contrast)

    picture = np.asarray(image, np.float32) * shades[:, :, None] * light * contrast + haze
    picture += noise.normal(0, sheet.uniform(*camera.noise), picture.shape).astype(np.float32)
    return np.clip(picture, 0, 255).astype(np.uint8)


def draw_all(draw, classes, per_class, folder):
    """Write the pictures that `draw(class, number)` returns (uint8, (size, size, 3)) to files.

    Returns `folder`; the files are `folder`/<class>/<class><number>.png. Numbers begin with 0 and
    have as many digits as the last. The folder gets its name when it is whole. One that holds so
    many pictures already is kept; raises OSError if it holds anything else.
    """
    if _is_drawn(folder, classes, per_class):
        return folder
    digits = len(str(per_class - 1))
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".drawing-") as temporary:
        whole = Path(temporary) / folder.name
        for label in classes:
            (whole / label).mkdir(parents=True)
            for number in range(per_class):
                picture = Image.fromarray(draw(label, number))
                picture.save(whole / label / f"{label}{number:0{digits}d}.png", compress_level=1)
        try:
            os.rename(whole, folder)
        except OSError:  # there is one, from another process just now
            if not _is_drawn(folder, classes, per_class):
                raise
    return folder


def _is_drawn(folder, classes, per_class):
    if not folder.exists() or not any(folder.iterdir()):
        return False
    if len(list(folder.glob("*/*.png"))) != per_class * len(classes):
        raise OSError(f"it holds something other than {per_class} pictures of each class")
    return True


def command_line(draw, classes, per_class):
    """What a drawing program does when it is run: python draw.py FOLDER."""
    what = f"Draws {per_class} pictures of each class: {', '.join(classes)}."
    where = "the pictures are written to FOLDER/<class>/<class><number>.png"
    parser = argparse.ArgumentParser(description=what)
    parser.add_argument("folder", metavar="FOLDER", type=Path, help=where)
    folder = parser.parse_args().folder
    try:
        draw_all(draw, classes, per_class, folder)
    except OSError as error:
        sys.exit(
            f"Error: The pictures cannot be written to {folder}: {error}. "
            "No picture was kept: name another folder, with room, that you may write to."
        )
