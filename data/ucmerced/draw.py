"""Draws small scenes from above: a stand-in for the UC Merced Land Use set.

It is for where that set cannot be downloaded. The pictures are not photographs and show no
place that there is.

    python data/ucmerced/draw.py FOLDER

writes FOLDER/<class>/<class><number>.png, 100 pictures of each of the 21 classes, under the
names that the real set gives them.

A picture is composed in three steps, and the file follows them: the map (`Scene`), whose season,
sun and colours are chosen by lot; one function for each class, which lays the ground and what
lies and stands on it; the light, in which an aeroplane photographs the scene.

A scene is laid out in metres with the origin in its middle, then turned, scaled and shifted as
a whole, so that a picture shows about the 77 m that one of the real set shows. Points are
complex numbers, directions angles in radians; whatever has a height throws its shadow. Season
and light vary in every class: colour alone does not give the class away. Dense, medium and
sparse residential are one drawing with overlapping densities.

The promises are those of `data/drawing.py`, which has what this program shares with other ones.
"""

import math
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))  # data/, where drawing.py lies

from drawing import (
    Camera,
    Sheet,
    command_line,
    darker,
    lighter,
    mixed,
    photographed,
    polar,
)

SEED = 2010
PER_CLASS = 100
TILE = 77  # metres that a picture is wide, before scaling
FAR = 90  # metres from the middle: what crosses the picture begins and ends here
LANE = 3.6  # metres
UPRIGHT = math.pi / 2

WHITE = (236, 236, 230)
YELLOW = (226, 190, 70)
SAND = (214, 194, 156)
SEASONS = (  # grass, leaves, soil
    ((98, 142, 66), (48, 92, 44), (140, 112, 80)),
    ((128, 148, 84), (62, 98, 52), (158, 132, 96)),
    ((172, 156, 104), (76, 96, 54), (184, 158, 116)),
    ((138, 128, 88), (96, 90, 48), (126, 104, 78)),
    ((86, 118, 70), (38, 72, 48), (112, 92, 72)),
)
ASPHALTS = ((92, 92, 96), (116, 114, 112), (142, 138, 132), (74, 76, 82))
CONCRETES = ((186, 182, 172), (164, 162, 158), (198, 190, 176))
WATERS = ((46, 84, 98), (58, 98, 122), (66, 88, 74), (86, 96, 78), (36, 58, 72), (84, 118, 128))
ROOFS = ((150, 92, 70), (118, 106, 98), (172, 152, 128), (96, 98, 106), (134, 78, 62))
FLAT_ROOFS = ((206, 204, 196), (170, 166, 158), (142, 140, 138), (186, 172, 150), (112, 112, 116))
CARS = ((232, 232, 232), (40, 42, 48), (176, 40, 36), (44, 72, 140), (150, 154, 160))
COURTS = (  # around the lines, within them
    ((72, 112, 84), (52, 92, 138)),
    ((150, 86, 66), (78, 118, 82)),
    ((66, 96, 140), (66, 96, 140)),
    ((130, 126, 120), (104, 116, 110)),
    ((178, 116, 82), (178, 116, 82)),
)

AEROPLANE = Camera(
    blur=0.55,
    patches=6,
    unevenness=0.06,
    exposure=(0.72, 1.15),
    haze=26,
    contrast=(0.78, 1.05),
    noise=(1.5, 6),
)


def draw(label: str, number: int, size: int = 64) -> np.ndarray:
    """Picture `number` of the class `label`: RGB bytes of the shape (size, size, 3).

    Raises ValueError for a class that is not in CLASSES.
    """
    if label not in CLASSES:
        raise ValueError(f"No class {label!r} is drawn. There is: {', '.join(CLASSES)}.")
    scene = Scene(f"{SEED} {label} {number}", size)
    compose = SCENES[CLASSES.index(label)]
    compose(scene)
    return photographed(scene, AEROPLANE)


# The map, its season and its sun


class Scene(Sheet):
    """A map in metres, and what is drawn on it everywhere."""

    def __init__(self, name, size):
        super().__init__(name, size)
        self.unit = self.canvas / (TILE * self.uniform(0.8, 1.15))
        self.axis = polar(self.unit, self.uniform(0, 2 * math.pi))
        aside = complex(self.uniform(-9, 9), self.uniform(-9, 9))
        self.middle = self.canvas / 2 * (1 + 1j) + self.axis * aside

        # the shadow of one metre of height
        self.shadow = polar(self.uniform(0.35, 1.1), self.uniform(0, 2 * math.pi))
        grass, leaf, soil = self.choice(SEASONS)
        self.grass = self.tint(grass, 14)
        self.leaf = self.tint(leaf, 14)
        self.soil = self.tint(soil, 14)
        self.asphalt = self.tint(self.choice(ASPHALTS), 8)
        self.concrete = self.tint(self.choice(CONCRETES), 8)
        self.water = self.tint(self.choice(WATERS), 12)
        self.dark = darker(self.asphalt, 0.4)  # where a shadow falls
        self.fill(self.grass)

    def at(self, point):
        place = point * self.axis + self.middle
        return place.real, place.imag

    def sees(self, point, margin):
        """Whether a point is in the picture, or not more than `margin` metres beside it."""
        x, y = self.at(point)
        margin *= self.unit
        return -margin < x < self.canvas + margin and -margin < y < self.canvas + margin

    def anywhere(self):
        """A point of the picture."""
        place = complex(self.uniform(0, self.canvas), self.uniform(0, self.canvas))
        return (place - self.middle) / self.axis

    def dashes(self, y, width, colour, on, off, turn=1, begin=-FAR):
        """Dashes, `on` metres long and `off` apart, that lie as a `strip` does."""
        x = begin
        while x < FAR:
            if self.sees(turn * complex(x, y), on):
                self.line([turn * complex(x, y), turn * complex(x + on, y)], width, colour)
            x += on + off

    def strip(self, y, width, colour, turn=1, begin=-FAR):
        """A line across the picture, `y` metres beside the middle, turned by the number `turn`."""
        self.line([turn * complex(begin, y), turn * complex(FAR, y)], width, colour)

    def blob(self, centre, radius, colour, rough=0.25):
        """A round patch with an uneven edge."""
        edge = []
        for k in range(14):
            distance = radius * self.uniform(1 - rough, 1 + rough)
            edge.append(centre + polar(distance, 2 * math.pi * k / 14))
        self.polygon(edge, colour)

    def patches(self, *colours):
        """The ground in one of these colours, and uneven patches of all of them."""
        self.fill(self.choice(colours))
        for _ in range(10):
            self.blob(self.anywhere(), self.uniform(4, 12), self.tint(self.choice(colours), 11))

    def box(self, centre, length, width, colour, turn=0.0, height=0.0):
        """A rectangle, `length` along the direction `turn`; with a height it throws a shadow."""
        along = polar(length / 2, turn)
        aside = polar(width / 2, turn + UPRIGHT)
        corners = [-along - aside, along - aside, along + aside, -along + aside]
        steps = (0.35, 0.7, 1.0) if height > 4 else (1.0,) if height else ()
        for part in steps:
            fallen = centre + part * height * self.shadow
            self.polygon([fallen + corner for corner in corners], self.dark)
        self.polygon([centre + corner for corner in corners], colour)

    def tree(self, centre, radius, colour=None):
        """A crown, its shadow, and the side of it that the sun shines on."""
        if not self.sees(centre, 2 * radius):
            return
        crown = self.tint(colour or self.leaf, 14)
        away_from_sun = self.shadow / abs(self.shadow)
        self.disc(centre + radius * 0.8 * self.shadow, radius, darker(self.leaf, 0.5))
        self.disc(centre, radius, crown)
        self.disc(centre - away_from_sun * radius * 0.3, radius * 0.55, lighter(crown, 16))

    def trees(self, count, smallest=1.8, largest=4.0):
        """Trees anywhere in the picture."""
        for _ in range(count):
            self.tree(self.anywhere(), self.uniform(smallest, largest))

    def car(self, centre, turn, length=4.6):
        if self.sees(centre, 4):
            self.box(centre, length, 2.1, self.choice(CARS), turn, 1.0)

    def house(self, centre, length, width, turn, colour):
        """A gabled roof, its two sides in different light; often with a wing."""
        roof = self.tint(colour, 12)
        lit = lighter(roof, 24)
        aside = polar(width / 4, turn + UPRIGHT)
        if self.chance(0.6):
            wing = polar(length * self.choice((-0.25, 0.25)), turn) + 1.8 * aside
            self.box(centre + wing, length * 0.42, width * 0.8, lit, turn, 4.0)
        self.box(centre, length, width, roof, turn, 4.5)
        towards_sun = -1 if (self.shadow * polar(1, -turn)).imag > 0 else 1
        self.box(centre + aside * towards_sun, length, width / 2, lit, turn)


def places(columns, rows, wide, deep):
    """The middles of so many fields, `wide` and `deep` metres large, around the origin."""
    for column in range(columns):
        for row in range(rows):
            yield complex((column - (columns - 1) / 2) * wide, (row - (rows - 1) / 2) * deep)


def winding(scene, amplitude, wavelength, centre=0.0):
    """A smooth random line across the picture: a point every 5 metres."""
    first = scene.uniform(0, 6.3)
    second = scene.uniform(0, 6.3)
    points = []
    for x in range(-75, 76, 5):
        wave = math.sin(x / wavelength + first) + 0.4 * math.sin(2.3 * x / wavelength + second)
        points.append(complex(x, centre + amplitude * wave))
    return points


# Roads


def carriageway(scene, y, lanes, turn, surface, density):
    """A road with edges, dashed lanes and traffic. Returns its width."""
    width = lanes * LANE + 3
    scene.strip(y, width, surface, turn)
    for edge, colour in ((-1, YELLOW), (1, WHITE)):
        scene.strip(y + edge * lanes * LANE / 2, 0.45, colour, turn)
    for k in range(1, lanes):
        scene.dashes(y + (k - lanes / 2) * LANE, 0.45, WHITE, 3, 6, turn)
    for k in range(lanes):
        x = scene.uniform(-FAR, -70)
        while x < FAR:
            place = turn * complex(x, y + (k + 0.5 - lanes / 2) * LANE)
            scene.car(place, math.atan2(turn.imag, turn.real), scene.choice((4.6, 4.6, 4.6, 13)))
            x += scene.uniform(9, 40) / density
    return width


def freeway(scene):
    """Two carriageways with grass or a barrier between them."""
    scene.patches(scene.grass, scene.soil)
    scene.trees(scene.choice((3, 10, 20)), 1.2, 3.2)
    two_carriageways(scene, scene.choice((2, 3, 4)), scene.choice((1.5, 3, 8, 14)))


def two_carriageways(scene, lanes, gap):
    if gap < 5:
        scene.strip(0, gap, scene.concrete)
    for side in (-1, 1):
        y = side * (gap / 2 + lanes * LANE / 2 + 1.5)
        carriageway(scene, y, lanes, 1 + 0j, scene.asphalt, scene.uniform(0.4, 1.6))


def overpass(scene):
    """A freeway, and a road on a bridge across it."""
    scene.patches(scene.grass, scene.soil)
    scene.trees(scene.choice((3, 10, 20)), 1.2, 3.2)
    two_carriageways(scene, scene.choice((2, 2, 3)), scene.choice((2, 6, 10)))
    turn = polar(1, scene.uniform(1.1, 2.04))
    lanes = scene.choice((2, 2, 4, 6))
    width = lanes * LANE + 3
    for part in (0.5, 1):
        ends = [end * turn + scene.shadow * 9 * part for end in (-FAR, FAR)]
        scene.line(ends, width, scene.dark)
    scene.strip(0, width + 2, lighter(scene.concrete, 22), turn)
    deck = scene.tint(scene.choice((scene.asphalt, scene.concrete)), 12)
    carriageway(scene, 0, lanes, turn, deck, scene.uniform(0.3, 1.2))


def intersection(scene):
    """Two streets that cross, houses at the corners, cars that wait at zebra crossings."""
    scene.fill(scene.choice((scene.grass, scene.soil, scene.concrete)))
    scene.trees(scene.choice((4, 10)), 1.5, 3.2)
    for corner in places(2, 2, 60, 60):
        if scene.chance(0.7):
            size = scene.uniform(12, 22), scene.uniform(10, 18)
            scene.house(corner, *size, scene.choice((0, UPRIGHT)), scene.choice(ROOFS))
    bend = polar(1, UPRIGHT + scene.uniform(-0.25, 0.25))
    streets = [(scene.choice((9, 12, 16, 19)), turn) for turn in (1, bend)]
    for more, colour in ((4, scene.concrete), (0, scene.asphalt)):
        for width, turn in streets:
            scene.strip(0, width + more, colour, turn)
    zebra = scene.chance(0.55)
    for (width, turn), (other, _) in zip(streets, reversed(streets)):
        stop = other / 2 + 3
        for way in (turn, -turn):
            if zebra:
                for k in range(int(width / 1.6)):
                    y = (k + 0.5) * 1.6 - width / 2
                    stripe = [way * complex(stop - 2, y), way * complex(stop + 1, y)]
                    scene.line(stripe, 0.7, WHITE)
            else:
                bar = [way * complex(stop, -width / 2), way * complex(stop, width / 2)]
                scene.line(bar, 0.7, WHITE)
            scene.strip(0, 0.6, YELLOW, way, stop + 2.4)
            for k in range(scene.choice((0, 1, 2, 3))):
                place = way * complex(stop + 6 + 8 * k, width / 4)
                scene.car(place, math.atan2(way.imag, way.real))


# Fields, woods and shores


def agricultural(scene):
    """One field of slanting rows, or two with a lane between them."""
    fields = [(-FAR, FAR)]
    if scene.chance(0.4):
        fields = [(-FAR, 0), (0, FAR)]
    wheat = (196, 172, 104)
    ploughed = (104, 82, 62)
    colours = (scene.grass, scene.soil, scene.leaf, wheat, ploughed)
    for left, right in fields:
        plants, soil = scene.random.sample(colours, 2)
        pitch = scene.uniform(2.2, 6.5)
        slant = polar(1, scene.uniform(-0.4, 0.4)) if len(fields) == 1 else 1
        for k in range(int(-FAR / pitch), int(FAR / pitch) + 1):
            row = [slant * complex(x, k * pitch) for x in (left, right)]
            furrow = [end + slant * 0.5j * pitch for end in row]
            scene.line(row, pitch + 0.5, scene.tint(plants, 7))
            scene.line(furrow, pitch * scene.uniform(0.4, 0.55), scene.tint(soil, 7))
    if len(fields) == 2:
        scene.strip(0, scene.uniform(3, 5), scene.soil, 1j)


def chaparral(scene):
    """Dry ground with many small bushes, sometimes a track."""
    scene.patches(scene.soil, scene.tint(scene.soil, 30), scene.tint((192, 172, 134), 20))
    if scene.chance(0.25):
        scene.line(winding(scene, 10, 25), scene.uniform(1.5, 3), scene.tint((204, 184, 148)))
    bush = scene.choice((scene.leaf, (84, 88, 58), (66, 78, 54), (98, 94, 62), (58, 62, 48)))
    for _ in range(scene.random.randrange(90, 190)):
        scene.tree(scene.anywhere(), scene.choice((0.8, 1.0, 1.3, 1.7, 2.3)), bush)


def forest(scene):
    """Crown beside crown, in autumn some of them yellow and red."""
    scene.fill(darker(scene.leaf, 0.5))
    crowns = [scene.tint(scene.leaf, 16) for _ in range(3)]
    if scene.chance(0.2):
        crowns += [(168, 120, 50), (150, 84, 46)]
    small, large = scene.choice(((1.6, 3.0), (2.2, 4.2), (3, 5.5)))
    for _ in range(int(1500 / (small + large))):
        scene.tree(scene.anywhere(), scene.uniform(small, large), scene.choice(crowns))
    if scene.chance(0.3):
        scene.blob(scene.anywhere(), scene.uniform(4, 8), scene.grass)


def river(scene):
    """Meadows, a bank, the water with a deeper middle, trees along it."""
    scene.patches(scene.grass, scene.soil, scene.leaf, scene.grass)
    width = scene.uniform(10, 24)
    course = winding(scene, scene.uniform(8, 16), scene.uniform(12, 22))
    bank = scene.tint(scene.choice((scene.soil, scene.leaf, SAND)), 12)
    for wide, colour in ((width + scene.uniform(3, 7), bank), (width, scene.water)):
        for point in course:
            scene.disc(point, wide / 2, colour)
        scene.line(course, wide, colour)
    scene.line(course, width * 0.4, lighter(scene.water, -8))
    if scene.chance(0.4):
        scene.blob(scene.choice(course), scene.uniform(2, 4), SAND)
    for _ in range(scene.choice((20, 60, 110))):
        aside = scene.choice((-1j, 1j)) * (width / 2 + scene.uniform(1.5, 30))
        foot = scene.choice(course) + scene.uniform(-4, 4)
        scene.tree(foot + aside, scene.uniform(1.4, 3.6))


def beach(scene):
    """Sand, the sea that gets deeper, surf, parasols, and sometimes trees behind."""
    sand = scene.tint(scene.choice((SAND, (200, 180, 142), (232, 220, 192))), 8)
    scene.fill(sand)
    shore = winding(scene, scene.uniform(1.5, 6), scene.uniform(14, 30), scene.uniform(-12, 14))
    seas = ((40, 110, 128), (52, 96, 116), (70, 130, 132), (62, 92, 96))
    sea = scene.tint(scene.choice(seas), 10)
    stripes = [(-5, darker(sand, 0.8)), (-1.5, WHITE)]
    stripes += [(7 * part, mixed(sea, sand, (4 - part) / 7)) for part in range(5)]
    for offset, colour in stripes:
        edge = [point + 1j * (offset + scene.uniform(-0.6, 0.6)) for point in shore]
        scene.polygon([*edge, 90 + 110j, -90 + 110j], colour)
    for offset in scene.random.sample(range(4, 50, 5), scene.choice((1, 2, 3, 4))):
        left = scene.random.randrange(0, 18)
        breaker = [point + 1j * offset for point in shore[left : left + 10]]
        scene.line(breaker, scene.uniform(0.8, 2.6), WHITE)
    for _ in range(scene.choice((0, 4, 12, 20))):
        place = complex(scene.uniform(-50, 50), shore[0].imag - scene.uniform(14, 40))
        scene.disc(place + scene.shadow * 1.6, 1.4, darker(sand, 0.67))
        scene.disc(place, 1.4, scene.choice((*CARS, YELLOW)))
    if scene.chance(0.5):
        for _ in range(40):
            place = complex(scene.uniform(-70, 70), scene.uniform(-70, -35))
            scene.tree(place, scene.uniform(1, 2.8))


# Homes


def denseresidential(scene):
    """Houses close to one another on small lots."""
    homes(scene, scene.uniform(10.5, 15), scene.uniform(14.5, 19), scene.uniform(8.8, 10.5))


def mediumresidential(scene):
    """Houses with a garden each."""
    homes(scene, scene.uniform(15.5, 25), scene.uniform(20, 28), scene.uniform(12, 15))


def sparseresidential(scene):
    """Few large houses among trees."""
    homes(scene, scene.uniform(29, 60), scene.uniform(33, 55), scene.uniform(13, 20))
    scene.trees(scene.choice((4, 12, 30)), 2, 4.5)


def homes(scene, frontage, depth, length):
    """Streets with a house every `frontage` metres on both sides, on lots `depth` metres deep."""
    scene.trees(10, 1.5, 4)
    street = scene.uniform(6, 9)
    roofs = scene.random.sample(ROOFS, 4)
    pitch = street + 2 * depth
    nearest = round(-depth / 2 - street / 2) * scene.choice((-1, 1))
    further = int(80 / pitch) + 1
    for k in range(-further, further + 1):
        y = nearest + k * pitch
        scene.strip(y, street + 3, scene.concrete)
        scene.strip(y, street, scene.asphalt)
        for side in (-1j, 1j):
            x = -75 - scene.uniform(0, frontage)
            while x < 75 + frontage:
                kerb = complex(x, y) + side * street / 2
                if scene.sees(kerb + side * depth / 2, max(frontage, depth)):
                    home(scene, kerb, side, frontage, depth, length, scene.choice(roofs))
                x += frontage * scene.uniform(0.94, 1.06)
            for x in range(-66, 70, scene.choice((14, 22, 60))):
                scene.car(complex(x, y) + side * (street / 2 - 1), 0)


def home(scene, kerb, side, frontage, depth, length, roof):
    """A lawn, a drive, a house, sometimes a car and a pool, trees behind it."""
    house = kerb + side * (1.5 + depth * scene.uniform(0.4, 0.5))
    lawn = house + side * depth * 0.1
    scene.box(lawn, frontage * 0.92, depth * 0.8, scene.tint(scene.grass, 12))
    drive = min(frontage * 0.28, 8)
    scene.line([kerb + drive, house + drive], 3.2, scene.concrete)
    if scene.chance(0.3):
        scene.car((kerb + house) / 2 + drive, UPRIGHT)
    behind = house + side * depth * 0.32
    if scene.chance(0.16):
        scene.blob(behind, 3.0, (84, 170, 190))
    for _ in range(int(scene.uniform(0.4, 2.6) + frontage * depth / 700)):
        aside = complex(scene.uniform(-0.45, 0.45) * frontage, scene.uniform(-0.16, 0.16) * depth)
        scene.tree(behind + aside, scene.uniform(1.4, 3.4))
    size = length * scene.uniform(0.85, 1.12), length * scene.uniform(0.65, 0.95)
    scene.house(house, *size, scene.choice((0, 0, 0, UPRIGHT)), roof)


def mobilehomepark(scene):
    """Long light boxes in slanting rows along narrow lanes, with a car or a tree beside them."""
    scene.fill(scene.choice((scene.grass, scene.soil, scene.concrete, scene.soil)))
    length = scene.uniform(14, 18)
    width = scene.uniform(4.4, 5.6)
    pitch = width + scene.uniform(4.5, 7.5)
    lane = scene.uniform(5, 7)
    slant = scene.uniform(-0.5, 0.5) + UPRIGHT
    depth = length + scene.uniform(2, 5)
    for k in range(-3, 4):
        y = k * (2 * depth + lane)
        scene.strip(y, lane, scene.asphalt)
        for side in (-1j, 1j):
            x = -75 + scene.uniform(0, pitch)
            while x < 75:
                here = complex(x, y) + side * (lane / 2 + depth / 2)
                x += pitch
                if not scene.sees(here, length):
                    continue
                roof = scene.tint(scene.choice((WHITE, *FLAT_ROOFS[:2], (184, 196, 200))), 8)
                scene.box(here, length * scene.uniform(0.85, 1), width, roof, slant, 2.6)
                ridge = polar(length * 0.4, slant)
                scene.line([here - ridge, here + ridge], 0.4, darker(roof, 0.83))
                beside = here + pitch / 2
                if scene.chance(0.4):
                    scene.car(beside - side * length * 0.25, slant)
                elif scene.chance(0.4):
                    scene.tree(beside + side * length * 0.2, scene.uniform(1, 2.2))


# Town and industry


def buildings(scene):
    """Blocks with flat roofs and machines on them, a street, trees and parked cars."""
    scene.fill(scene.choice((scene.asphalt, scene.concrete, scene.grass, scene.asphalt)))
    for turn in (1, 1j):
        if scene.chance(0.75):
            y = scene.uniform(34, 44) * scene.choice((-1, 1))
            scene.strip(y, 13, scene.concrete, turn)
            scene.strip(y, 10, scene.asphalt, turn)
            scene.dashes(y, 0.4, YELLOW, 4, 4, turn)
    scene.trees(scene.choice((0, 4, 9)))
    for place in places(scene.choice((3, 6, 9)), 2, 8, 6):
        scene.car(place, UPRIGHT)
    columns, rows = scene.choice(((1, 1), (2, 1), (2, 2), (3, 1), (3, 2)))
    for place in places(columns, rows, 76 / columns, 76 / rows):
        length = 76 / columns * scene.uniform(0.6, 0.88)
        width = 76 / rows * scene.uniform(0.5, 0.85)
        roof = scene.tint(scene.choice(FLAT_ROOFS), 10)
        height = scene.uniform(5, 11)
        if scene.chance(0.4):
            wing = complex(length * 0.3, width * 0.25)
            scene.box(place + wing, length * 0.4, width * 1.1, roof, 0, height)
        scene.box(place, length, width, lighter(roof, 26), 0, height)
        scene.box(place, length - 1.6, width - 1.6, roof)
        if scene.chance(0.25):
            court = scene.choice((scene.dark, scene.grass, (70, 90, 110)))
            scene.box(place, length * 0.4, width * 0.4, court)
        for _ in range(scene.random.randrange(2, 8)):
            aside = complex(scene.uniform(-0.4, 0.4) * length, scene.uniform(-0.4, 0.4) * width)
            scene.box(place + aside, scene.uniform(2, 5), 3, scene.choice(CARS), 0, 1.8)


def parkinglot(scene):
    """Rows of stalls, most of them taken; some have islands with trees, or a store beside them."""
    scene.fill(scene.asphalt)
    aisle = scene.uniform(6, 8)
    busy = scene.uniform(0.6, 0.97)
    paint = scene.choice((WHITE, YELLOW, WHITE))
    islands = scene.chance(0.45)
    for k in range(-4, 5):
        y = k * (10.4 + aisle)
        scene.strip(y, 1.8 if islands else 0.5, scene.grass if islands else paint)
        for j in range(-25, 26):
            x = j * 2.8
            if not scene.sees(complex(x, y), 6):
                continue
            scene.line([complex(x, y - 5.2), complex(x, y + 5.2)], 0.3, paint)
            for side in (-1, 1):
                place = complex(x + 1.4, y + side * (2.6 + scene.uniform(-0.3, 0.3)))
                if islands and j % 12 == 0:
                    scene.tree(place, 1.7)
                elif scene.chance(busy):
                    scene.car(place, UPRIGHT, scene.uniform(4, 5))
    if scene.chance(0.25):
        store = complex(0, scene.uniform(44, 52))
        scene.box(store, 160, 28, scene.choice(FLAT_ROOFS), 0, 6)


def storagetanks(scene):
    """Round tanks in rows, small or large, with lanes and a pipe between them."""
    scene.fill(scene.choice((scene.concrete, scene.soil, scene.grass, scene.asphalt)))
    metals = ((226, 226, 220), (196, 198, 198), (212, 200, 176), (176, 150, 126), (150, 156, 158))
    metal = scene.choice(metals)
    for x in range(-60, 61, scene.choice((30, 40))):
        scene.strip(x, 1.5, scene.tint(scene.soil, 20), 1j)
    fields = ((1, 1, 22), (2, 1, 16), (2, 2, 14), (2, 2, 11), (3, 2, 9), (3, 3, 8))
    columns, rows, radius = scene.choice(fields)
    pitch = 2 * radius * scene.uniform(1.2, 1.5)
    scene.strip(-pitch / 2, 1.0, (120, 118, 112))
    scene.trees(scene.choice((0, 0, 5)), 1.5, 3)
    if columns < 3:
        radius *= scene.uniform(0.75, 1.0)
    for place in places(columns, rows, pitch, pitch):
        tank(scene, place, radius, scene.tint(metal, 10))


def tank(scene, centre, radius, metal):
    """A tank with a shadow, a rim, and a roof that may have ribs or lie deep."""
    for part in (0.35, 0.7, 1):
        scene.disc(centre + scene.shadow * 9 * part, radius, scene.dark)
    scene.disc(centre, radius, darker(metal, 0.8))
    scene.disc(centre, radius * 0.94, metal)
    away_from_sun = scene.shadow / abs(scene.shadow)
    if scene.chance(0.35):  # the wall's shadow falls inside
        scene.disc(centre, radius * 0.9, darker(metal, 0.5))
        scene.disc(centre + away_from_sun * radius * 0.16, radius * 0.76, darker(metal, 0.83))
    else:
        scene.disc(centre - away_from_sun * radius * 0.3, radius * 0.5, lighter(metal, 14))
    ribs = scene.choice((0, 0, 8, 12))
    for k in range(ribs):
        rib = polar(radius * 0.9, 2 * math.pi * k / ribs)
        scene.line([centre, centre + rib], 0.3, darker(metal, 0.88))


# Harbour and airport


def harbor(scene):
    """Water, piers that begin at a quay, boats at the piers, cars on the quay."""
    scene.fill(scene.water)
    planks = scene.choice((scene.concrete, (150, 126, 98), (204, 200, 190)))
    length = scene.uniform(8, 15)
    pitch = 2 * length + scene.uniform(5, 11)
    berth = length * scene.uniform(0.42, 0.6)
    quay = scene.uniform(24, 60)
    for k in range(-3, 4):
        x = k * pitch + pitch / 4
        scene.line([complex(x, -80), complex(x, quay)], 2.2, planks)
        y = quay - 5
        while y > -68:
            for side in (-1, 1):
                place = complex(x + side * (length / 2 + 1.8), y)
                if scene.sees(place, length) and scene.chance(0.85):
                    jetty = complex(x, y + berth / 2)
                    scene.line([jetty, jetty + side * length * 0.8], 0.8, planks)
                    boat(scene, place, scene.choice((-1, 1)) * length * scene.uniform(0.75, 1.0))
            y -= berth
    land = [complex(-90, quay), complex(90, quay), 90 + 120j, -90 + 120j]
    scene.polygon(land, scene.choice((scene.concrete, scene.asphalt)))
    for x in range(-60, 61, 10):
        scene.car(complex(x + scene.uniform(-2, 2), quay + 6), UPRIGHT)


def boat(scene, centre, length):
    """A hull with its shadow on the water, and a cabin. It points to the right if length > 0."""
    bow = length / 2
    beam = 1j * length * 0.17
    hull = [bow, bow * 0.3 + beam, -bow + beam * 0.9, -bow - beam * 0.9, bow * 0.3 - beam]
    scene.polygon([centre + x + scene.shadow * 1.2 for x in hull], darker(scene.water, 0.5))
    scene.polygon([centre + x for x in hull], scene.tint(WHITE, 14))
    cabins = ((40, 60, 110), (150, 120, 84), (190, 196, 200), (120, 40, 40), (80, 90, 96))
    scene.polygon([centre + x * 0.55 - bow * 0.15 for x in hull], scene.choice(cabins))


def airplane(scene):
    """An apron with joints and a yellow line, sometimes a hangar, one to three aeroplanes."""
    scene.fill(scene.choice((scene.concrete, scene.asphalt)))
    for x in range(-70, 71, 14):
        scene.strip(x, 0.3, scene.tint(scene.concrete, 25), 1j)
    scene.line(winding(scene, 6, 40, scene.uniform(-30, 30)), 0.8, YELLOW)
    if scene.chance(0.35):
        scene.box(58j, 160, 40, scene.choice(FLAT_ROOFS), 0, 6)
    count = scene.choice((1, 1, 2, 3))
    length = scene.uniform(28, 42) if count == 1 else scene.uniform(17, 26)
    heading = scene.uniform(0, 6.3) if count == 1 else UPRIGHT
    for place in places(count, 1, 30, 0):
        turn = heading + scene.uniform(-0.3, 0.3)
        plane(scene, place + scene.uniform(-6, 6) * 1j, length * polar(1, turn))
    for _ in range(scene.choice((1, 3, 5))):
        scene.car(scene.anywhere(), scene.uniform(0, 3), scene.uniform(3, 8))


def plane(scene, centre, nose):
    """An aeroplane that reaches from tail to nose along `nose`: shadow, wings, tail, hull.

    Its outlines are in lengths of it, and show its right side.
    """
    body = scene.tint(scene.choice((WHITE, WHITE, (200, 204, 210), (176, 180, 188))), 8)
    stripe = scene.choice(((40, 60, 130), (170, 40, 40), (30, 110, 90), (200, 120, 30), body))
    span = scene.uniform(0.42, 0.52)
    sweep = scene.uniform(0.1, 0.22)
    wings = [(0.12, 0), (0.1 - sweep, span), (0.03 - sweep, span), (-0.08, 0.04), (-0.08, 0)]
    tail = [(-0.36, 0), (-0.45, 0.17), (-0.49, 0.17), (-0.46, 0)]
    hull = [(0.5, 0), (0.47, 0.025), (0.4, 0.05), (-0.3, 0.05), (-0.5, 0.012)]
    parts = [(shape, scene.dark, scene.shadow * 2.6) for shape in (wings, tail, hull)]
    parts += [(wings, darker(body, 0.9), 0), (tail, stripe, 0), (hull, body, 0)]
    for outline, colour, offset in parts:
        right = [complex(x, y) for x, y in outline]
        left = [point.conjugate() for point in reversed(right)]
        scene.polygon([centre + offset + nose * point for point in right + left], colour)
    for side in (0.16j, -0.16j):
        engine = [centre + nose * (side + 0.04), centre + nose * (side - 0.08)]
        scene.line(engine, abs(nose) * 0.045, (120, 122, 128))


def runway(scene):
    """A broad strip with edges and dashes; some with its end, some with skid marks."""
    scene.fill(scene.choice((scene.grass, scene.soil, scene.tint(scene.grass, 20))))
    width = scene.uniform(26, 44)
    y = scene.uniform(-8, 8)
    surface = scene.choice((scene.asphalt, scene.concrete))
    scene.strip(y, width + scene.choice((0, 4, 12)), scene.tint(scene.asphalt, 16))
    scene.strip(y, width, surface)
    for side in (-1, 1):
        scene.strip(y + side * width * 0.45, 0.9, WHITE)
    if scene.chance(0.6):
        for _ in range(5):
            place = complex(scene.uniform(-10, 50), y + scene.uniform(-0.2, 0.2) * width)
            length = scene.uniform(20, 60)
            scene.box(place, length, scene.uniform(0.6, 1.8), darker(surface, 0.75))
    begin = -FAR
    if scene.chance(0.6):  # its end: a white line, and bars behind it
        end = scene.uniform(-38, -8)
        begin = end + 30
        scene.box(complex(end, y), 1.2, width, WHITE)
        bars = scene.choice((6, 8, 10))
        for k in range(bars):
            aside = (k + 0.5 - bars / 2) * width * 0.84 / bars
            scene.box(complex(end + 12, y + aside), 18, width * 0.42 / bars, WHITE)
    scene.dashes(y, 1.1, WHITE, scene.uniform(14, 22), scene.uniform(9, 14), begin=begin)


# Sports


def baseballdiamond(scene):
    """A lawn and a field of dirt that open like fans from home plate, four bases, two dugouts."""
    dirts = ((176, 134, 92), (196, 160, 118), (156, 112, 80), (188, 170, 138))
    dirt = scene.tint(scene.choice(dirts), 10)
    lawn = scene.tint(scene.choice((scene.grass, (92, 140, 62))), 8)
    base = scene.uniform(22, 29)
    home_plate = complex(-0.72 * base, 0)
    if scene.chance(0.5):
        scene.fill(scene.choice((scene.soil, scene.tint(scene.grass, 24))))
    corner = math.pi / 4
    fans = ((base * scene.uniform(3, 3.6), corner + 0.09, lawn), (base * 1.72, corner, dirt))
    for radius, opening, colour in fans:
        edge = [home_plate + polar(radius, opening * k / 12) for k in range(-12, 13)]
        scene.polygon([home_plate, *edge], colour)
    bases = [polar(base, corner), polar(base * 1.414, 0), polar(base, -corner)]
    if scene.chance(0.8):
        inner = home_plate + 0.1 * base
        scene.polygon([inner, *(inner + 0.86 * place for place in bases)], lawn)
    scene.disc(home_plate + base * 0.66, 2.8, dirt)
    scene.disc(home_plate, 4.2, dirt)
    for place in bases:
        scene.box(home_plate + place, 1.3, 1.3, WHITE, corner)
    for side in (-corner, corner):
        scene.line([home_plate, home_plate + polar(base * 3.2, side)], 0.5, WHITE)
        dugout = home_plate + polar(base * 0.62, side * 1.53)
        scene.box(dugout, 9, 2.4, scene.choice(FLAT_ROOFS), side, 2.5)
    for _ in range(scene.choice((0, 3, 6))):
        place = polar(scene.uniform(46, 60), scene.uniform(0, 6.3))
        scene.tree(place, scene.uniform(2, 4))


def tenniscourt(scene):
    """One to four courts in a fence, trees, sometimes a clubhouse."""
    scene.fill(scene.choice((scene.grass, scene.concrete, scene.asphalt, scene.soil)))
    scene.trees(scene.choice((3, 8, 16)), 1.8, 3.6)
    columns, rows = scene.choice(((1, 1), (2, 1), (2, 1), (3, 1), (2, 2)))
    around, inside = scene.choice(COURTS)
    around = scene.tint(around, 12)
    inside = scene.tint(inside, 12)
    scene.box(0j, columns * 17 + 4, rows * 35 + 4, scene.dark)
    scene.box(0j, columns * 17 + 3, rows * 35 + 3, around)
    for middle in places(columns, rows, 17, 35):
        scene.box(middle, 11.6, 24.4, inside)
        for x in (-5.5, -4.1, 4.1, 5.5):
            scene.box(middle + x, 0.6, 23.8, WHITE)
        for y, width in ((-11.9, 11), (-6.4, 8.2), (6.4, 8.2), (11.9, 11), (0, 12.8)):
            scene.box(middle + 1j * y, width, 0.6, WHITE)
        scene.box(middle, 0.6, 12.8, WHITE)
    if scene.chance(0.5):
        clubhouse = complex(columns * 8.5 + 14, scene.uniform(-15, 15))
        scene.house(clubhouse, scene.uniform(12, 18), 10, UPRIGHT, scene.choice(ROOFS))


def golfcourse(scene):
    """A mown fairway, a green with flag and bunkers, sometimes a pond and a path, trees."""
    lush = scene.tint(scene.choice((scene.grass, (104, 146, 70), (124, 158, 80))), 10)
    scene.fill(scene.choice((scene.grass, scene.leaf, lighter(lush, -14))))
    course = winding(scene, scene.uniform(7, 13), scene.uniform(18, 30), scene.uniform(-8, 8))
    width = scene.uniform(18, 26)
    for k, point in enumerate(course):
        scene.disc(point, width / 2, lighter(lush, (6, 18)[k // 2 % 2]))
    hole = scene.choice(course[10:20])
    if scene.chance(0.4):
        pond = complex(scene.uniform(-16, 16), scene.uniform(22, 32) * scene.choice((-1, 1)))
        scene.blob(hole + pond, scene.uniform(8, 12), scene.water, 0.15)
    for radius, light in ((scene.uniform(10, 12), 26), (scene.uniform(7.5, 9), 44)):
        scene.blob(hole, radius, lighter(lush, light), 0.1)
    sand = scene.tint((226, 208, 168), 12)
    for k in range(scene.random.randrange(3, 7)):
        bunker = hole + polar(scene.uniform(13, 16 + 3 * k), scene.uniform(0, 6.3))
        stretch = polar(scene.uniform(1.5, 3.4), scene.uniform(0, 3.1))
        for part in (-1, 0, 1):
            scene.blob(bunker + stretch * part, scene.uniform(2.6, 4.4), sand, 0.15)
    scene.line([hole, hole + scene.shadow * 5], 0.5, scene.dark)
    scene.disc(hole, 0.8, scene.choice((WHITE, YELLOW, (200, 50, 40))))
    if scene.chance(0.6):
        aside = 1j * (width / 2 + 5) * scene.choice((-1, 1))
        scene.line([point + aside for point in course], 2, scene.concrete)
    for _ in range(scene.choice((10, 24, 40))):
        aside = scene.choice((-1j, 1j)) * scene.uniform(width / 2 + 8, 40)
        foot = scene.choice(course) + scene.uniform(-4, 4)
        scene.tree(foot + aside, scene.uniform(1.8, 4))


SCENES = (
    agricultural,
    airplane,
    baseballdiamond,
    beach,
    buildings,
    chaparral,
    denseresidential,
    forest,
    freeway,
    golfcourse,
    harbor,
    intersection,
    mediumresidential,
    mobilehomepark,
    overpass,
    parkinglot,
    river,
    runway,
    sparseresidential,
    storagetanks,
    tenniscourt,
)
CLASSES = tuple(scene.__name__ for scene in SCENES)


if __name__ == "__main__":
    command_line(draw, CLASSES, PER_CLASS)
