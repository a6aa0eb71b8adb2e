"""Draws small scenes from above: a stand-in for the UC Merced Land Use set where it cannot be downloaded. Not photographs.

    python data/ucmerced/draw.py FOLDER

writes FOLDER/<class>/<class><number>.png, 100 pictures of each of the 21 classes, under the names that the real set gives
them. A scene is laid out in metres with the origin in its middle (points are complex numbers), then turned, scaled and shifted
as a whole, so that a picture shows about the 77 m that one of the real set shows. Season, light, blur and noise vary in every class:
colour alone does not give the class away. Dense, medium and sparse residential are one drawing with overlapping densities.

Promises: a picture depends on its class, number and size and on nothing else. Every call gives the same bytes; so do other
machines of the same kind with the same versions of Pillow and NumPy. Needs no fonts, no files, no network.
"""

import cmath
import math
import random
import sys
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFilter

SEED = 2010
TILE = 77  # metres that a picture is wide, before scaling
PER_CLASS = 100
FINER = 3  # drawn so many times larger, then reduced: smooth edges
REACH = 75  # metres from the middle beyond which nothing is seen

WHITE, YELLOW = (236, 236, 230), (226, 190, 70)
SEASONS = (  # grass, leaves, soil
    ((98, 142, 66), (48, 92, 44), (140, 112, 80)),
    ((128, 148, 84), (62, 98, 52), (158, 132, 96)),
    ((172, 156, 104), (76, 96, 54), (184, 158, 116)),
    ((138, 128, 88), (96, 90, 48), (126, 104, 78)),
    ((86, 118, 70), (38, 72, 48), (112, 92, 72)),
)
ROOFS = ((150, 92, 70), (118, 106, 98), (172, 152, 128), (96, 98, 106), (190, 184, 174), (134, 78, 62))
FLAT_ROOFS = ((206, 204, 196), (170, 166, 158), (142, 140, 138), (186, 172, 150), (112, 112, 116), (222, 222, 220))
CARS = ((232, 232, 232), (40, 42, 48), (176, 40, 36), (44, 72, 140), (150, 154, 160), (206, 196, 170), (90, 96, 100), (52, 96, 70))
WATERS = ((46, 84, 98), (58, 98, 122), (66, 88, 74), (86, 96, 78), (36, 58, 72), (84, 118, 128))


def lighter(colour, more):
    return tuple(max(0, min(255, channel + more)) for channel in colour)


def darker(colour, share):
    return tuple(int(channel * share) for channel in colour)


class Scene:
    """A canvas measured in metres, with a season, a sun and a source of random numbers of its own."""

    def __init__(self, name, size):
        self.random = random.Random(name)  # seeded by the text itself: the same in every process
        self.uniform, self.choice, self.chance = self.random.uniform, self.random.choice, lambda p: self.random.random() < p
        self.canvas = FINER * size
        self.zoom = self.canvas / (TILE * self.uniform(0.8, 1.15))  # pixels of the canvas a metre
        self.axis = cmath.rect(self.zoom, self.uniform(0, 2 * math.pi))
        self.middle = self.canvas / 2 * (1 + 1j) + self.axis * complex(self.uniform(-9, 9), self.uniform(-9, 9))
        self.shadow = cmath.rect(self.uniform(0.35, 1.1), self.uniform(0, 2 * math.pi))  # of one metre of height
        self.grass, self.leaf, self.soil = (self.tint(colour, 14) for colour in self.choice(SEASONS))
        self.asphalt = self.tint(self.choice(((92, 92, 96), (116, 114, 112), (142, 138, 132), (74, 76, 82))), 8)
        self.concrete = self.tint(self.choice(((186, 182, 172), (164, 162, 158), (198, 190, 176))), 8)
        self.water = self.tint(self.choice(WATERS), 12)
        self.image = Image.new("RGB", (self.canvas, self.canvas), self.grass)
        self.pen = ImageDraw.Draw(self.image)

    def tint(self, colour, by=10):
        """A colour near `colour`: its brightness differs by up to `by`, each channel by a third of that."""
        brightness = self.uniform(-by, by)
        return tuple(max(0, min(255, round(channel + brightness + self.uniform(-by, by) / 3))) for channel in colour)

    def at(self, point):
        place = point * self.axis + self.middle
        return place.real, place.imag

    def sees(self, point, margin=0):
        x, y = self.at(point)
        margin *= self.zoom
        return -margin < x < self.canvas + margin and -margin < y < self.canvas + margin

    def anywhere(self):
        """A point of the picture."""
        place = complex(self.uniform(0, self.canvas), self.uniform(0, self.canvas))
        return (place - self.middle) / self.axis

    def fill(self, colour):
        self.pen.rectangle((0, 0, self.canvas, self.canvas), colour)

    def polygon(self, points, colour):
        self.pen.polygon([self.at(point) for point in points], colour)

    def line(self, points, width, colour):
        self.pen.line([self.at(point) for point in points], colour, max(1, round(width * self.zoom)), "curve" if len(points) > 2 else None)

    def dashes(self, start, end, width, colour, on, off):
        step = (end - start) / abs(end - start)
        for k in range(int(abs(end - start) / (on + off))):
            begin = start + step * k * (on + off)
            if self.sees(begin, on):
                self.line([begin, begin + step * on], width, colour)

    def disc(self, centre, radius, colour):
        (x, y), r = self.at(centre), radius * self.zoom
        self.pen.ellipse((x - r, y - r, x + r, y + r), colour)

    def box(self, centre, length, width, colour, turn=0.0, height=0.0):
        """A rectangle, `length` along the direction `turn` (radians); with a height it casts a shadow."""
        along, across = cmath.rect(length / 2, turn), cmath.rect(width / 2, turn + math.pi / 2)
        corners = [centre - along - across, centre + along - across, centre + along + across, centre - along + across]
        for part in (0.35, 0.7, 1.0) if height > 4 else (1.0,) if height else ():
            self.polygon([corner + part * height * self.shadow for corner in corners], self.dark)
        self.polygon(corners, colour)

    @property
    def dark(self):
        return darker(self.asphalt, 0.4)

    def blob(self, centre, radius, colour, rough=0.25, corners=14):
        """A round patch with an uneven edge."""
        self.polygon([centre + cmath.rect(radius * self.uniform(1 - rough, 1 + rough), 2 * math.pi * k / corners) for k in range(corners)], colour)

    def tree(self, centre, radius, colour=None):
        if not self.sees(centre, 2 * radius):
            return
        colour = self.tint(colour or self.leaf, 14)
        self.disc(centre + radius * 0.8 * self.shadow, radius, darker(self.leaf, 0.5))
        self.disc(centre, radius, colour)
        self.disc(centre - self.shadow / abs(self.shadow) * radius * 0.3, radius * 0.55, lighter(colour, 16))

    def trees(self, count, smallest=1.8, largest=4.0):
        for _ in range(count):
            self.tree(self.anywhere(), self.uniform(smallest, largest))

    def car(self, centre, turn, length=4.6):
        if self.sees(centre, 4):
            colour = self.choice(CARS)
            self.box(centre, length, 2.1, colour, turn, 1.0)
            self.box(centre - cmath.rect(0.3, turn), length * 0.45, 1.7, darker(colour, 0.67), turn)

    def house(self, centre, length, width, turn, colour=None):
        """A gabled roof, its two sides in different light; often with a wing."""
        colour = self.tint(colour or self.choice(ROOFS), 12)
        wing = centre + cmath.rect(length * self.choice((-0.25, 0.25)), turn) + cmath.rect(width * 0.45, turn + math.pi / 2)
        lit = lighter(colour, 24)
        if self.chance(0.6):
            self.box(wing, length * 0.42, width * 0.8, lit, turn, 4.0)
        self.box(centre, length, width, colour, turn, 4.5)
        towards_sun = -1 if (self.shadow * cmath.rect(1, -turn)).imag > 0 else 1
        self.box(centre + cmath.rect(width / 4 * towards_sun, turn + math.pi / 2), length, width / 2, lit, turn)


def winding(s, amplitude, wavelength, centre=0.0):
    """A smooth random line across the picture."""
    phase, second = s.uniform(0, 6.3), s.uniform(0, 6.3)
    return [complex(x, centre + amplitude * (math.sin(x / wavelength + phase) + 0.4 * math.sin(2.3 * x / wavelength + second)))
            for x in range(-REACH, REACH + 1, 5)]


def road(s, y, width, turn=1 + 0j, middle=YELLOW, kerb=True):
    """A street along the direction `turn`, `y` metres to its side."""
    start, end = turn * complex(-90, y), turn * complex(90, y)
    if kerb:
        s.line([start, end], width + 3, s.concrete)
    s.line([start, end], width, s.asphalt)
    if middle:
        s.dashes(start, end, 0.4, middle, 4, 4)


def agricultural(s):
    for side in (1, -1) if s.chance(0.4) else (0,):
        first, second = s.random.sample((s.grass, s.soil, s.leaf, (196, 172, 104), (120, 136, 72), (104, 82, 62), (150, 132, 84)), 2)
        pitch, slant = s.uniform(2.2, 6.5), cmath.rect(1, s.uniform(-0.4, 0.4)) if side >= 0 else 1j
        y = -90.0
        while y < 90:
            ends = (-90, 90) if side == 0 else (0, 110) if side > 0 else (-110, 0)
            corners = [complex(x, y + dy) * (slant if side == 0 else 1) for x, dy in ((ends[0], 0), (ends[1], 0), (ends[1], pitch), (ends[0], pitch))]
            s.polygon(corners, s.tint(first, 7))
            s.line([(corners[2] + corners[1]) / 2, (corners[0] + corners[3]) / 2], pitch * s.uniform(0.4, 0.55), s.tint(second, 7))
            y += pitch
        if side < 0:
            s.line([-90j, 90j], s.uniform(3, 5), s.soil)
    if s.chance(0.15):
        road(s, s.uniform(25, 45), 5, 1j, None, False)


def airplane(s):
    s.fill(s.choice((s.concrete, s.asphalt)))
    for x in range(-70, 71, 14):
        s.line([complex(x, -80), complex(x, 80)], 0.3, s.tint(s.concrete, 25))
    s.line(winding(s, 6, 40, s.uniform(-30, 30)), 0.8, YELLOW)
    if s.chance(0.35):
        s.box(complex(0, 58), 160, 40, s.choice(FLAT_ROOFS), 0, 6)
    planes = s.choice((1, 1, 2, 3))
    for k in range(planes):
        length = s.uniform(28, 42) if planes == 1 else s.uniform(17, 26)
        nose = cmath.rect(1, s.uniform(-0.3, 0.3) + (math.pi / 2 if planes > 1 else s.uniform(0, 6.3)))
        plane(s, complex((k - (planes - 1) / 2) * 30, s.uniform(-6, 6)), length, nose)
    for _ in range(s.choice((1, 3, 5))):
        s.car(s.anywhere(), s.uniform(0, 3), s.uniform(3, 8))


def plane(s, centre, length, nose):
    body, wing = s.tint(s.choice((WHITE, WHITE, (200, 204, 210), (176, 180, 188))), 8), length * s.uniform(0.42, 0.52)
    stripe = s.choice(((40, 60, 130), (170, 40, 40), (30, 110, 90), (200, 120, 30), body))

    def outline(points, colour, offset=0j):
        s.polygon([centre + offset + nose * length * complex(x, y * side) for side in (1, -1) for x, y in (points if side > 0 else points[::-1])],
                  colour)

    span, sweep = wing / length, s.uniform(0.1, 0.22)
    wings = [(0.12, 0), (0.1 - sweep, span), (0.03 - sweep, span), (-0.08, 0.04), (-0.08, 0)]
    tail = [(-0.36, 0), (-0.45, 0.17), (-0.49, 0.17), (-0.46, 0)]
    hull = [(0.5, 0), (0.47, 0.025), (0.4, 0.05), (-0.3, 0.05), (-0.5, 0.012)]
    for shape in (wings, tail, hull):
        outline(shape, s.dark, s.shadow * 2.6)
    outline(wings, darker(body, 0.9))
    outline(tail, stripe)
    for side in (0.16, -0.16) if length < 26 or s.chance(0.6) else (0.14, -0.14, 0.28, -0.28):
        s.line([centre + nose * length * complex(x, side) for x in (0.1 - abs(side) * 0.4, -0.02 - abs(side) * 0.4)], length * 0.045, (120, 122, 128))
    outline(hull, body)
    s.line([centre + nose * length * -0.5, centre + nose * length * -0.36], length * 0.02, stripe)


def baseballdiamond(s):
    dirt = s.tint(s.choice(((176, 134, 92), (196, 160, 118), (156, 112, 80), (188, 170, 138))), 10)
    lawn, base = s.tint(s.choice((s.grass, (92, 140, 62))), 8), s.uniform(22, 29)
    home = complex(-0.72 * base, 0)
    if s.chance(0.5):
        s.fill(s.choice((s.soil, s.tint(s.grass, 24))))

    def fan(radius, colour, opening=math.pi / 4, centre=home):
        s.polygon([centre] + [centre + cmath.rect(radius, opening * k / 12) for k in range(-12, 13)], colour)

    fan(base * s.uniform(3, 3.6), lawn, math.pi / 4 + 0.09)
    fan(base * 1.72, dirt, math.pi / 4 + 0.05, home)
    bases = [home + cmath.rect(base * reach, turn) for reach, turn in ((0.13, 0), (1, math.pi / 4), (1.414, 0), (1, -math.pi / 4))]
    if s.chance(0.8):
        inner, corners = base * 0.86, ((1, math.pi / 4), (1.414, 0), (1, -math.pi / 4))
        s.polygon([home + 0.1 * base] + [home + 0.1 * base + cmath.rect(inner * reach, turn) for reach, turn in corners], lawn)
    s.disc(home + base * 0.66, 2.8, dirt)
    s.disc(home, 4.2, dirt)
    for side in (1, -1):
        s.line([home, home + cmath.rect(base * 3.2, side * math.pi / 4)], 0.5, WHITE)
    for place in bases[1:]:
        s.box(place, 1.3, 1.3, WHITE, math.pi / 4)
    s.line([home + cmath.rect(7, turn) for turn in (2.2, 2.7, math.pi, -2.7, -2.2)], 0.8, s.dark)
    for side in (1, -1):
        s.box(home + cmath.rect(base * 0.62, side * (math.pi / 4 + 0.42)), 9, 2.4, s.choice(FLAT_ROOFS), side * math.pi / 4, 2.5)
    for _ in range(s.choice((0, 3, 6))):
        s.tree(cmath.rect(s.uniform(46, 60), s.uniform(0, 6.3)), s.uniform(2, 4))


def beach(s):
    sand = s.tint(s.choice(((220, 202, 164), (200, 180, 142), (186, 170, 148), (232, 220, 192))), 8)
    s.fill(sand)
    shore = winding(s, s.uniform(1.5, 6), s.uniform(14, 30), s.uniform(-12, 14))
    sea = s.tint(s.choice(((40, 110, 128), (52, 96, 116), (70, 130, 132), (62, 92, 96))), 10)

    def beyond(offset, colour):
        s.polygon([point + 1j * (offset + s.uniform(-0.6, 0.6)) for point in shore] + [90 + 110j, -90 + 110j], colour)

    beyond(-5, darker(sand, 0.8))
    beyond(-1.5, WHITE)
    for part in range(5):
        beyond(7 * part, tuple((sea[i] * (part + 3) + sand[i] * (4 - part)) // 7 for i in range(3)))
    for offset in s.random.sample(range(4, 50, 5), s.choice((1, 2, 3, 4))):
        left = s.random.randrange(0, 18)
        s.line([point + 1j * offset for point in shore[left:left + s.random.randrange(6, 14)]], s.uniform(0.8, 2.6), WHITE)
    for _ in range(s.choice((0, 4, 12, 20))):
        place = s.anywhere()
        if place.imag < shore[0].imag - 14:
            s.disc(place + s.shadow * 1.6, 1.4, darker(sand, 0.67))
            s.disc(place, 1.4, s.choice(CARS[2:] + (WHITE, YELLOW)))
    if s.chance(0.5):
        behind = s.uniform(-46, -28)
        for _ in range(40):
            s.tree(complex(s.uniform(-70, 70), behind - s.uniform(0, 25)), s.uniform(1, 2.8))


def buildings(s):
    s.fill(s.choice((s.asphalt, s.concrete, s.grass, s.asphalt)))
    for turn in (1, 1j):
        if s.chance(0.75):
            road(s, s.uniform(34, 44) * s.choice((-1, 1)), s.uniform(8, 12), turn)
    s.trees(s.choice((0, 4, 9)))
    for row in (-1, 1):
        for k in range(s.choice((3, 6, 9))):
            s.car(complex(-34 + k * 8 + s.uniform(-1, 1), row * 3), s.choice((0, math.pi / 2)))
    columns, rows = s.choice(((1, 1), (2, 1), (2, 2), (3, 1), (3, 2)))
    for column in range(columns):
        for row in range(rows):
            cell = complex((column - (columns - 1) / 2) * 76 / columns, (row - (rows - 1) / 2) * 76 / rows)
            block(s, cell, 76 / columns * s.uniform(0.6, 0.88), 76 / rows * s.uniform(0.5, 0.85), s.uniform(5, 11))


def block(s, centre, length, width, height):
    """A building with a flat roof, a parapet and machines on top; some have a second wing or a court."""
    roof = s.tint(s.choice(FLAT_ROOFS), 10)
    rim = lighter(roof, 26)
    for place, long, wide in [(centre, length, width)] + [(centre + complex(length * 0.3, width * 0.25), length * 0.4, width * 1.1)] * s.chance(0.4):
        s.box(place, long, wide, rim, 0, height)
        s.box(place, long - 1.6, wide - 1.6, roof)
    if s.chance(0.25):
        s.box(centre, length * 0.4, width * 0.4, s.choice((s.dark, s.grass, (70, 90, 110))))
    for _ in range(s.random.randrange(2, 8)):
        s.box(centre + complex(s.uniform(-0.4, 0.4) * length, s.uniform(-0.4, 0.4) * width), s.uniform(2, 5), s.uniform(2, 4),
              s.choice(((120, 120, 122), WHITE, (90, 92, 96))), 0, 1.8)


def chaparral(s):
    s.fill(s.choice((s.soil, s.tint(s.soil, 30), s.tint((192, 172, 134), 20), s.grass)))
    for _ in range(14):
        s.blob(s.anywhere(), s.uniform(4, 12), s.tint(s.soil, 10))
    if s.chance(0.25):
        s.line(winding(s, 10, 25), s.uniform(1.5, 3), s.tint((204, 184, 148), 10))
    bush = s.choice((s.leaf, (84, 88, 58), (66, 78, 54), (98, 94, 62), (58, 62, 48)))
    for _ in range(s.random.randrange(90, 190)):
        s.tree(s.anywhere(), s.choice((0.8, 1.0, 1.3, 1.7, 2.3)), bush)


def homes(s, frontage, depth, length, width):
    """Streets with a house every `frontage` metres on both sides, and `depth` metres from the kerb to the fence behind."""
    s.trees(10, 1.5, 4)
    street, roofs = s.uniform(6, 9), s.random.sample(ROOFS, 4)
    pitch, start = street + 2 * depth, s.uniform(0, frontage)
    nearest = round(-depth / 2 - street / 2) * s.choice((-1, 1))
    for k in range(-int(80 / pitch) - 1, int(80 / pitch) + 2):
        y = nearest + k * pitch
        road(s, y, street, middle=None)
        for side in (-1, 1):
            x = start - REACH - frontage
            while x < REACH + frontage:
                here = complex(x, y + side * (street / 2 + 1.5 + depth * s.uniform(0.4, 0.5)))
                if s.sees(here, max(frontage, depth)):
                    lot(s, here, frontage, depth, complex(x, y + side * street / 2), side)
                    s.house(here, length * s.uniform(0.85, 1.12), width * s.uniform(0.85, 1.1), 0 if s.chance(0.8) else math.pi / 2, s.choice(roofs))
                x += frontage * s.uniform(0.94, 1.06)
            if s.chance(0.5):
                for x in range(-66, 70, s.choice((9, 14, 22))):
                    s.car(complex(x + s.uniform(-3, 3), y + side * (street / 2 - 1)), 0)


def lot(s, here, frontage, depth, kerb, side):
    """What is around a house: a drive, a lawn of its own, trees, sometimes a pool."""
    s.box(here + 1j * side * depth * 0.1, frontage * 0.92, depth * 0.8, s.tint(s.grass, 12))
    drive = complex(here.real + min(frontage * 0.28, 8), kerb.imag)
    s.line([drive, complex(drive.real, here.imag)], 3.2, s.concrete)
    if s.chance(0.3):
        s.car(complex(drive.real, (kerb.imag + here.imag) / 2), math.pi / 2)
    behind = here + 1j * side * depth * 0.32
    if s.chance(0.16):
        s.blob(behind, 3.0, (84, 170, 190), 0.2, 8)
    for _ in range(int(s.uniform(0.4, 2.6) + frontage * depth / 700)):
        s.tree(behind + complex(s.uniform(-0.45, 0.45) * frontage, s.uniform(-0.2, 0.12) * depth), s.uniform(1.4, 3.4))


def denseresidential(s):
    homes(s, s.uniform(10.5, 15), s.uniform(14.5, 19), s.uniform(8.8, 10.5), s.uniform(8.5, 11))


def mediumresidential(s):
    homes(s, s.uniform(15.5, 25), s.uniform(20, 28), s.uniform(12, 15), s.uniform(9, 11.5))


def sparseresidential(s):
    homes(s, s.uniform(29, 60), s.uniform(33, 55), s.uniform(13, 20), s.uniform(9, 13))
    s.trees(s.choice((4, 12, 30)), 2, 4.5)


def forest(s):
    s.fill(darker(s.leaf, 0.5))
    autumn = s.chance(0.2)
    palette = [s.tint(s.leaf, 16) for _ in range(3)] + ([(168, 120, 50), (150, 84, 46)] if autumn else [s.grass] if s.chance(0.3) else [])
    small, large = s.choice(((1.6, 3.0), (2.2, 4.2), (3, 5.5)))
    for _ in range(int(1500 / (small + large))):
        s.tree(s.anywhere(), s.uniform(small, large), s.choice(palette))
    for _ in range(s.choice((0, 0, 1))):
        s.blob(s.anywhere(), s.uniform(4, 8), s.grass)


def traffic(s, y, turn, density):
    """Cars and some lorries along a lane."""
    x = -80 + s.uniform(0, 15)
    while x < 80:
        if s.chance(0.15):
            s.box(turn * complex(x, y), 14, 2.6, s.choice((WHITE, (150, 60, 50), (120, 130, 150))), cmath.phase(turn), 3)
        else:
            s.car(turn * complex(x, y), cmath.phase(turn))
        x += s.uniform(9, 40) / density


def carriageways(s, turn, lanes, gap, density):
    """Two one-way roads side by side: solid edges, dashed lanes, no crossing."""
    width, lane = lanes * 3.6 + 4, 3.6
    for side in (-1, 1):
        y = side * (gap / 2 + width / 2)
        s.line([turn * complex(-90, y), turn * complex(90, y)], width, s.asphalt)
        for edge, colour in ((-side, YELLOW), (side, WHITE)):
            s.line([turn * complex(x, y + edge * lanes * lane / 2) for x in (-90, 90)], 0.45, colour)
        for k in range(1, lanes):
            s.dashes(turn * complex(-90, y + (k - lanes / 2) * lane), turn * complex(90, y + (k - lanes / 2) * lane), 0.45, WHITE, 3, 6)
        for k in range(lanes):
            traffic(s, y + (k + 0.5 - lanes / 2) * lane, turn, density)
    return gap + 2 * width


def roadside(s):
    s.fill(s.choice((s.grass, s.soil, s.tint(s.grass, 25))))
    for _ in range(8):
        s.blob(s.anywhere(), s.uniform(5, 12), s.tint(s.choice((s.grass, s.soil)), 10))
    s.trees(s.choice((3, 10, 20)), 1.2, 3.2)


def freeway(s):
    roadside(s)
    gap = s.choice((1.5, 3, 8, 14))
    if gap < 5:
        s.line([-90, 90], gap, s.concrete)
    width = carriageways(s, 1 + 0j, s.choice((2, 3, 4)), gap, s.uniform(0.4, 1.6))
    if gap < 5:
        s.line([-90, 90], 0.9, lighter(s.concrete, 20))
    if s.chance(0.35):
        ramp = [complex(x, width / 2 + 3 + 0.004 * max(0, x + 30) ** 2) for x in range(-80, 81, 8)]
        s.line(ramp, 7, s.asphalt)
        s.line([point + 3j for point in ramp], 0.4, WHITE)


def golfcourse(s):
    lush = s.tint(s.choice((s.grass, (104, 146, 70), (124, 158, 80), (92, 134, 78))), 10)
    s.fill(s.choice((s.grass, s.leaf, lighter(lush, -14))))
    mown = [lighter(lush, more) for more in (6, 18)]
    course, width = winding(s, s.uniform(7, 13), s.uniform(18, 30), s.uniform(-8, 8)), s.uniform(18, 26)
    for point in course:
        s.disc(point, width / 2 + 0.8, lush)
    for k, point in enumerate(course):
        s.disc(point, width / 2, mown[k // 2 % 2])
    hole = s.choice(course[10:20])
    if s.chance(0.4):
        s.blob(hole + complex(s.uniform(-16, 16), s.uniform(22, 32) * s.choice((-1, 1))), s.uniform(8, 12), s.water, 0.15, 20)
    for radius, more in ((s.uniform(10, 12), 26), (s.uniform(7.5, 9), 44)):
        s.blob(hole, radius, lighter(lush, more), 0.1, 20)
    sand = s.tint((226, 208, 168), 12)
    for k in range(s.random.randrange(3, 7)):
        bunker = hole + cmath.rect(s.uniform(13, 16 + 3 * k), s.uniform(0, 6.3))
        stretch = cmath.rect(s.uniform(1.5, 3.4), s.uniform(0, 3.1))
        for part in (-1, 0, 1):
            s.blob(bunker + stretch * part, s.uniform(2.6, 4.4), sand, 0.15, 10)
    s.line([hole, hole + s.shadow * 5], 0.5, s.dark)
    s.disc(hole, 0.8, s.choice((WHITE, YELLOW, (200, 50, 40))))
    if s.chance(0.6):
        aside = 1j * (width / 2 + 5) * s.choice((-1, 1))
        s.line([point + aside for point in course], 2, s.concrete)
    for _ in range(s.choice((10, 24, 40))):
        s.tree(s.choice(course) + complex(s.uniform(-4, 4), s.choice((-1, 1)) * s.uniform(width / 2 + 8, 40)), s.uniform(1.8, 4))


def boat(s, centre, length, turn):
    bow, beam = cmath.rect(length / 2, turn), cmath.rect(length * 0.17, turn + math.pi / 2)
    hull = [bow, bow * 0.3 + beam, -bow + beam * 0.9, -bow - beam * 0.9, bow * 0.3 - beam]
    s.polygon([centre + point + s.shadow * 1.2 for point in hull], darker(s.water, 0.5))
    s.polygon([centre + point for point in hull], s.tint(WHITE, 14))
    s.polygon([centre + point * 0.55 - bow * 0.15 for point in hull],
              s.choice(((40, 60, 110), (150, 120, 84), (190, 196, 200), (120, 40, 40), (80, 90, 96))))
    if s.chance(0.3):
        s.line([centre + bow * 0.2, centre + bow * 0.2 + s.shadow * length * 0.5], 0.3, s.dark)


def harbor(s):
    s.fill(s.water)
    pier, length = s.choice((s.concrete, (150, 126, 98), (204, 200, 190))), s.uniform(8, 15)
    pitch, berth = 2 * length + s.uniform(5, 11), length * s.uniform(0.42, 0.6)
    quay = s.uniform(24, 60)
    for k in range(-3, 4):
        x = k * pitch + pitch / 4
        if abs(x) > 62:
            continue
        s.line([complex(x, -80), complex(x, quay)], 2.2, pier)
        y = quay - 5
        while y > -68:
            for side in (-1, 1):
                place = complex(x + side * (length / 2 + 1.8), y)
                if s.sees(place, length):
                    s.line([complex(x, y + berth / 2), complex(x + side * length * 0.8, y + berth / 2)], 0.8, pier)
                    if s.chance(0.85):
                        boat(s, place, length * s.uniform(0.75, 1.0), 0 if (side > 0) != s.chance(0.2) else math.pi)
            y -= berth
    s.polygon([complex(-90, quay), complex(90, quay), 90 + 120j, -90 + 120j], s.choice((s.concrete, s.asphalt)))
    for x in range(-60, 61, 5):
        if s.chance(0.5):
            s.car(complex(x, quay + 6), math.pi / 2)


def intersection(s):
    s.fill(s.choice((s.grass, s.soil, s.concrete)))
    s.trees(s.choice((4, 10)), 1.5, 3.2)
    bend, widths = cmath.rect(1, math.pi / 2 + s.uniform(-0.25, 0.25)), [s.choice((9, 12, 16, 19)) for _ in range(2)]
    for corner in (1 + 1j, 1 - 1j, -1 + 1j, -1 - 1j):
        if s.chance(0.7):
            place = complex(corner.real * s.uniform(27, 34), corner.imag * s.uniform(27, 34))
            if s.chance(0.5):
                s.house(place, s.uniform(12, 18), s.uniform(9, 13), s.choice((0, math.pi / 2)))
            else:
                s.box(place, s.uniform(14, 24), s.uniform(12, 20), s.choice(FLAT_ROOFS), 0, s.uniform(4, 9))
    for width, turn in zip(widths, (1, bend)):
        s.line([-90 * turn, 90 * turn], width + 4, s.concrete)
    for width, turn in zip(widths, (1, bend)):
        s.line([-90 * turn, 90 * turn], width, s.asphalt)
    zebra = s.chance(0.55)
    for (width, other), turn in zip((widths, widths[::-1]), (1, bend)):
        for way in (turn, -turn):
            stop = other / 2 + 3
            if zebra:
                for k in range(int(width / 1.6)):
                    y = (k + 0.5) * 1.6 - width / 2
                    s.line([way * complex(stop - 1.6, y), way * complex(stop + 1.4, y)], 0.7, WHITE)
            else:
                s.line([way * complex(stop, -width / 2), way * complex(stop, width / 2)], 0.6, WHITE)
                s.line([way * complex(stop - 2, -width / 2), way * complex(stop - 2, width / 2)], 0.4, WHITE)
            s.line([way * (stop + 2.4), way * 90], 0.6, YELLOW)
            if width > 13:
                for side in (-1, 1):
                    s.dashes(way * complex(stop + 3, side * width / 4), way * complex(90, side * width / 4), 0.4, WHITE, 3, 4)
            for k in range(s.choice((0, 1, 2, 3))):
                s.car(way * complex(stop + 6 + 8 * k, width / 4), cmath.phase(way))
    if s.chance(0.4):
        s.car(complex(s.uniform(-3, 3), s.uniform(-3, 3)), s.uniform(0, 6.3))


def mobilehomepark(s):
    s.fill(s.choice((s.grass, s.soil, s.concrete, s.soil)))
    length, width = s.uniform(14, 18), s.uniform(4.4, 5.6)
    pitch, lane, slant = width + s.uniform(4.5, 7.5), s.uniform(5, 7), s.choice((-1, 1)) * s.uniform(0.0, 0.5) + math.pi / 2
    depth = length + s.uniform(2, 5)
    for k in range(-3, 4):
        y = k * (2 * depth + lane)
        s.line([complex(-90, y), complex(90, y)], lane, s.asphalt)
        for side in (-1, 1):
            x = -REACH + s.uniform(0, pitch)
            while x < REACH:
                here = complex(x, y + side * (lane / 2 + depth / 2))
                if s.sees(here, length) and s.chance(0.94):
                    roof = s.tint(s.choice(((226, 226, 222), (206, 202, 192), (190, 186, 184), (168, 160, 150), (214, 204, 186), (184, 196, 200))), 8)
                    s.box(here, length * s.uniform(0.85, 1), width, roof, slant, 2.6)
                    s.line([here - cmath.rect(length * 0.4, slant), here + cmath.rect(length * 0.4, slant)], 0.4,
                           darker(roof, 0.83))
                    beside = here + pitch / 2
                    if s.chance(0.4):
                        s.car(beside - 1j * side * length * 0.25, slant)
                    elif s.chance(0.4):
                        s.tree(beside + 1j * side * length * 0.2, s.uniform(1, 2.2))
                x += pitch


def overpass(s):
    roadside(s)
    carriageways(s, 1 + 0j, s.choice((2, 2, 3)), s.choice((2, 6, 10)), s.uniform(0.4, 1.4))
    turn = cmath.rect(1, s.uniform(1.1, 2.04))
    lanes = s.choice((2, 2, 4, 6))
    width = lanes * 3.6 + 3
    for part in (0.5, 1):
        s.line([-90 * turn + s.shadow * 9 * part, 90 * turn + s.shadow * 9 * part], width, s.dark)
    s.line([-90 * turn, 90 * turn], width + 1.8, lighter(s.concrete, 22))
    deck = s.tint(s.choice((s.asphalt, s.concrete)), 12)
    s.line([-90 * turn, 90 * turn], width, deck)
    s.line([-90 * turn, 90 * turn], 0.6, YELLOW)
    for k in range(1, lanes):
        if k != lanes // 2:
            s.dashes(turn * complex(-90, (k - lanes / 2) * 3.6), turn * complex(90, (k - lanes / 2) * 3.6), 0.45, WHITE, 3, 6)
    for k in range(lanes):
        traffic(s, (k + 0.5 - lanes / 2) * 3.6, turn, s.uniform(0.3, 1.2))


def parkinglot(s):
    s.fill(s.asphalt)
    stall, aisle, deep = 2.8, s.uniform(6, 8), 5.2
    busy, paint = s.uniform(0.6, 0.97), s.choice((WHITE, YELLOW, WHITE))
    islands = s.chance(0.45)
    for k in range(-5, 6):
        y = k * (2 * deep + aisle)
        if abs(y) > 66:
            continue
        s.line([complex(-80, y), complex(80, y)], 0.5 if not islands else 1.8, paint if not islands else s.grass)
        for j in range(-25, 26):
            x = j * stall
            if not s.sees(complex(x, y), 6):
                continue
            s.line([complex(x, y - deep), complex(x, y + deep)], 0.3, paint)
            for side in (-1, 1):
                if islands and j % 12 == 0:
                    s.tree(complex(x + stall / 2, y + side * deep * 0.5), 1.7)
                elif s.chance(busy):
                    s.car(complex(x + stall / 2, y + side * (deep / 2 + s.uniform(-0.3, 0.3))), math.pi / 2, s.uniform(4, 5))
    if s.chance(0.25):
        s.box(complex(0, s.uniform(44, 52)), 160, 28, s.choice(FLAT_ROOFS), 0, 6)


def river(s):
    s.fill(s.choice((s.grass, s.soil, s.leaf, s.grass)))
    for _ in range(12):
        s.blob(s.anywhere(), s.uniform(4, 12), s.tint(s.choice((s.grass, s.soil)), 12))
    width = s.uniform(10, 24)
    course = winding(s, s.uniform(8, 16), s.uniform(12, 22))
    wooded = s.choice((20, 60, 110))
    s.line(course, width + s.uniform(3, 7), s.tint(s.choice((s.soil, s.leaf, (206, 190, 156))), 12))
    s.line(course, width, s.water)
    for point in course:
        s.disc(point + complex(s.uniform(-2, 2), s.uniform(-2, 2)), width / 2, s.water)
    s.line([point + 1j * width * 0.12 for point in course], width * 0.4, lighter(s.water, -8))
    for _ in range(s.choice((0, 0, 1, 2))):
        s.blob(s.choice(course) + 1j * s.uniform(-0.5, 0.5) * width, s.uniform(2, 4), (200, 184, 150), 0.3)
    for _ in range(wooded):
        s.tree(s.choice(course) + complex(s.uniform(-4, 4), s.choice((-1, 1)) * (width / 2 + s.uniform(1.5, 30))), s.uniform(1.4, 3.6))


def runway(s):
    s.fill(s.choice((s.grass, s.soil, s.tint(s.grass, 20))))
    width = s.uniform(26, 44)
    y = s.uniform(-8, 8)
    strip = s.choice((s.asphalt, s.concrete))
    s.line([complex(-95, y), complex(95, y)], width + s.choice((0, 4, 12)), s.tint(s.asphalt, 16))
    s.line([complex(-95, y), complex(95, y)], width, strip)
    for side in (-1, 1):
        s.line([complex(x, y + side * width * 0.45) for x in (-95, 95)], 0.9, WHITE)
    end = s.uniform(-38, -8) if s.chance(0.6) else -120
    if s.chance(0.6):
        for _ in range(5):
            middle = complex(s.uniform(-10, 50), y + s.uniform(-0.2, 0.2) * width)
            s.line([middle - s.uniform(10, 30), middle + s.uniform(10, 30)], s.uniform(0.6, 1.8), darker(strip, 0.75))
    s.dashes(complex(max(end + 30, -90), y), complex(90, y), 1.1, WHITE, s.uniform(14, 22), s.uniform(9, 14))
    if end > -100:
        s.line([complex(end, y - width / 2), complex(end, y + width / 2)], 1.2, WHITE)
        bars = s.choice((6, 8, 10))
        for k in range(bars):
            across = (k + 0.5 - bars / 2) * width * 0.84 / bars
            s.line([complex(end + 3, y + across), complex(end + 21, y + across)], width * 0.42 / bars, WHITE)
        for chevron in range(1, 5) if s.chance(0.5) else ():
            tip = end - 12 * chevron
            s.line([complex(tip, y - width / 2), complex(tip + 10, y), complex(tip, y + width / 2)], 1.0, YELLOW)
    elif s.chance(0.7):
        for side in (-1, 1):
            for k in range(3):
                s.line([complex(-12, y + side * (6 + 2.6 * k)), complex(8, y + side * (6 + 2.6 * k))], 1.5, WHITE)
    if s.chance(0.3):
        s.line([complex(20, y + width / 2 - 1), complex(45, y + width / 2 + 14), complex(60, 80)], 14, s.asphalt)
        s.line([complex(20, y + width / 2 - 1), complex(45, y + width / 2 + 14), complex(60, 80)], 0.6, YELLOW)


def storagetanks(s):
    s.fill(s.choice((s.concrete, s.soil, s.grass, s.asphalt)))
    metal = s.choice(((226, 226, 220), (196, 198, 198), (212, 200, 176), (176, 150, 126), (150, 156, 158)))
    for x in range(-60, 61, s.choice((30, 40))):
        s.line([complex(x, -80), complex(x, 80)], 1.5, s.tint(s.soil, 20))
    count, large = s.choice(((1, 22), (2, 16), (4, 14), (4, 11), (6, 9), (9, 8)))
    columns = math.ceil(math.sqrt(count))
    pitch = 2 * large * s.uniform(1.2, 1.5)
    s.line([complex(-60, -pitch / 2), complex(60, -pitch / 2)], 1.0, (120, 118, 112))
    s.trees(s.choice((0, 0, 5)), 1.5, 3)
    if s.chance(0.3):
        s.car(s.anywhere(), s.uniform(0, 3))
    for k in range(count):
        centre = complex((k % columns - (columns - 1) / 2) * pitch, (k // columns - (math.ceil(count / columns) - 1) / 2) * pitch)
        tank(s, centre, large * (s.uniform(0.75, 1.0) if count < 5 else 1), s.tint(metal, 10))


def tank(s, centre, radius, colour):
    for part in (0.35, 0.7, 1):
        s.disc(centre + s.shadow * 9 * part, radius, s.dark)
    s.disc(centre, radius, darker(colour, 0.8))
    sun = -s.shadow / abs(s.shadow)
    s.disc(centre, radius * 0.94, colour)
    spokes = s.choice((0, 0, 8, 12))
    for k in range(spokes):
        s.line([centre, centre + cmath.rect(radius * 0.9, 6.283 * k / spokes)], 0.3, darker(colour, 0.88))
    if s.chance(0.35):  # a floating roof lies deep: the wall's shadow falls inside
        s.disc(centre, radius * 0.9, darker(colour, 0.5))
        s.disc(centre - sun * radius * 0.16, radius * 0.76, darker(colour, 0.83))
    else:
        s.disc(centre + sun * radius * 0.3, radius * 0.5, lighter(colour, 14))
    s.line([centre + cmath.rect(radius, 0.4 * k + abs(centre)) for k in range(5)], 0.8, (110, 106, 100))


def tenniscourt(s):
    s.fill(s.choice((s.grass, s.concrete, s.asphalt, s.soil)))
    s.trees(s.choice((3, 8, 16)), 1.8, 3.6)
    columns, rows = s.choice(((1, 1), (2, 1), (2, 1), (3, 1), (2, 2)))
    around, inside = s.choice((((72, 112, 84), (52, 92, 138)), ((150, 86, 66), (78, 118, 82)), ((96, 128, 96), (92, 124, 92)),
                               ((66, 96, 140), (66, 96, 140)), ((130, 126, 120), (104, 116, 110)), ((178, 116, 82), (178, 116, 82)),
                               ((84, 120, 90), (150, 88, 72))))
    around, inside = s.tint(around, 12), s.tint(inside, 12)
    wide, deep = 17.0, 35.0
    s.box(0j, columns * wide + 3, rows * deep + 3, around, 0)
    for column in range(columns):
        for row in range(rows):
            middle = complex((column - (columns - 1) / 2) * wide, (row - (rows - 1) / 2) * deep)
            s.box(middle, 11.6, 24.4, inside)
            for x in (-5.5, -4.1, 4.1, 5.5):
                s.line([middle + complex(x, -11.9), middle + complex(x, 11.9)], 0.6, WHITE)
            for y in (-11.9, -6.4, 6.4, 11.9):
                wide_line = 5.5 if abs(y) > 7 else 4.1
                s.line([middle + complex(-wide_line, y), middle + complex(wide_line, y)], 0.6, WHITE)
            s.line([middle - 6.4j, middle + 6.4j], 0.6, WHITE)
            s.line([middle - 6.4 + 0.5 * s.shadow, middle + 6.4 + 0.5 * s.shadow], 0.8, s.dark)
            s.line([middle - 6.4, middle + 6.4], 0.4, WHITE)
    fence = [complex(x * (columns * wide + 3) / 2, y * (rows * deep + 3) / 2) for x, y in ((-1, -1), (1, -1), (1, 1), (-1, 1), (-1, -1))]
    s.line(fence, 0.5, s.dark)
    if s.chance(0.5):
        s.house(complex(columns * wide / 2 + 14, s.uniform(-15, 15)), s.uniform(12, 18), 10, s.choice((0, math.pi / 2)))


SCENES = (agricultural, airplane, baseballdiamond, beach, buildings, chaparral, denseresidential, forest, freeway, golfcourse, harbor, intersection,
          mediumresidential, mobilehomepark, overpass, parkinglot, river, runway, sparseresidential, storagetanks, tenniscourt)
CLASSES = tuple(scene.__name__ for scene in SCENES)


def draw(label: str, number: int, size: int = 64) -> np.ndarray:
    """Picture `number` of the class `label`: RGB bytes of the shape (size, size, 3). Raises ValueError for a class that is not in CLASSES."""
    if label not in CLASSES:
        raise ValueError(f"No class {label!r} is drawn. There is: {', '.join(CLASSES)}.")
    scene = Scene(f"{SEED} {label} {number}", size)
    SCENES[CLASSES.index(label)](scene)
    return photographed(scene, size)


def photographed(scene, size):
    """The drawing in the light of the day: reduced, blurred a little, tinted, in patches lighter and darker, with a sensor's noise."""
    image = scene.image.reduce(FINER).filter(ImageFilter.GaussianBlur(scene.uniform(0.0, 0.55) * size / 64))
    noise = np.random.default_rng(scene.random.getrandbits(64))
    patches = Image.fromarray(noise.normal(1, 0.06, (6, 6)).astype(np.float32)).resize((size, size), Image.Resampling.BICUBIC)
    light = scene.uniform(0.72, 1.15) * np.array([1 + scene.uniform(-0.09, 0.09), 1.0, 1 + scene.uniform(-0.12, 0.12)])
    haze, contrast = scene.uniform(0, 26), scene.uniform(0.78, 1.05)
    picture = np.asarray(image, np.float32) * np.asarray(patches)[:, :, None] * light.astype(np.float32) * contrast + haze
    picture += noise.normal(0, scene.uniform(1.5, 6), picture.shape).astype(np.float32)
    return np.clip(picture, 0, 255).astype(np.uint8)


if __name__ == "__main__":
    from ddp_common.datasets import draw_all

    draw_all(draw, CLASSES, PER_CLASS, Path(sys.argv[1]))
