"""Draws small scenes from above: a stand-in for the UC Merced Land Use set.

It is for where that set cannot be downloaded. The pictures are not photographs and show no
place that there is.

    python data/ucmerced/draw.py FOLDER

writes FOLDER/<class>/<class><number>.png, 100 pictures of each of the 21 classes, under the
names that the real set gives them.

A picture is composed in four steps, and the file follows them:

1. the map: season, sun, and the colours of grass, leaves, soil, asphalt, concrete and water are
   chosen by lot (`Scene`);
2. things that stand in many scenes: trees, cars, houses, roads, traffic;
3. the scene, one function for each class: it lays the ground, then what lies on it, and at last
   what stands on that;
4. the light: the scene is photographed from an aeroplane.

A scene is laid out in metres with the origin in its middle, then turned, scaled and shifted as
a whole, so that a picture shows about the 77 m that one of the real set shows. Points are
complex numbers, directions angles in radians; whatever has a height throws its shadow. Season
and light vary in every class: colour alone does not give the class away. Dense, medium and
sparse residential are one drawing with overlapping densities.

The promises are those of `data/drawing.py`, which has what this program shares with other ones.
"""

import cmath
import math
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))  # data/, where drawing.py lies

from drawing import (
    Camera,
    Sheet,
    command_line,
    darker,
    lighter,
    photographed,
    polar,
)

SEED = 2010
PER_CLASS = 100
TILE = 77  # metres that a picture is wide, before scaling
FAR = 90  # metres from the middle: roads that cross the picture begin and end here
REACH = 75  # metres from the middle beyond which nothing is seen
UPRIGHT = math.pi / 2

WHITE = (236, 236, 230)
YELLOW = (226, 190, 70)
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
ROOFS = (
    (150, 92, 70), (118, 106, 98), (172, 152, 128),
    (96, 98, 106), (190, 184, 174), (134, 78, 62),
)
FLAT_ROOFS = (
    (206, 204, 196), (170, 166, 158), (142, 140, 138),
    (186, 172, 150), (112, 112, 116), (222, 222, 220),
)
CARS = (
    (232, 232, 232), (40, 42, 48), (176, 40, 36), (44, 72, 140),
    (150, 154, 160), (206, 196, 170), (90, 96, 100), (52, 96, 70),
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

    def sees(self, point, margin=0):
        """Whether a point is in the picture, or not more than `margin` metres beside it."""
        x, y = self.at(point)
        margin *= self.unit
        return -margin < x < self.canvas + margin and -margin < y < self.canvas + margin

    def anywhere(self):
        """A point of the picture."""
        place = complex(self.uniform(0, self.canvas), self.uniform(0, self.canvas))
        return (place - self.middle) / self.axis

    def dashes(self, start, end, width, colour, on, off):
        """A line of dashes: `on` metres of colour, then `off` metres of none."""
        step = (end - start) / abs(end - start)
        for k in range(int(abs(end - start) / (on + off))):
            begin = start + step * k * (on + off)
            if self.sees(begin, on):
                self.line([begin, begin + step * on], width, colour)

    def blob(self, centre, radius, colour, rough=0.25, corners=14):
        """A round patch with an uneven edge."""
        edge = []
        for k in range(corners):
            distance = radius * self.uniform(1 - rough, 1 + rough)
            edge.append(centre + polar(distance, 2 * math.pi * k / corners))
        self.polygon(edge, colour)

    def box(self, centre, length, width, colour, turn=0.0, height=0.0):
        """A rectangle, `length` along the direction `turn`; with a height it throws a shadow."""
        along = polar(length / 2, turn)
        across = polar(width / 2, turn + UPRIGHT)
        corners = [
            centre - along - across,
            centre + along - across,
            centre + along + across,
            centre - along + across,
        ]
        if height > 4:
            steps = (0.35, 0.7, 1.0)
        elif height:
            steps = (1.0,)
        else:
            steps = ()
        for part in steps:
            self.polygon([corner + part * height * self.shadow for corner in corners], self.dark)
        self.polygon(corners, colour)

    # Things that stand in many scenes

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
        """A body, and a cabin that is darker because of its windows."""
        if not self.sees(centre, 4):
            return
        paint = self.choice(CARS)
        self.box(centre, length, 2.1, paint, turn, 1.0)
        self.box(centre - polar(0.3, turn), length * 0.45, 1.7, darker(paint, 0.67), turn)

    def house(self, centre, length, width, turn, colour=None):
        """A gabled roof, its two sides in different light; often with a wing."""
        roof = self.tint(colour or self.choice(ROOFS), 12)
        lit = lighter(roof, 24)
        across = turn + UPRIGHT
        wing = centre + polar(length * self.choice((-0.25, 0.25)), turn)
        wing += polar(width * 0.45, across)
        if self.chance(0.6):
            self.box(wing, length * 0.42, width * 0.8, lit, turn, 4.0)
        self.box(centre, length, width, roof, turn, 4.5)
        towards_sun = -1 if (self.shadow * polar(1, -turn)).imag > 0 else 1
        self.box(centre + polar(width / 4 * towards_sun, across), length, width / 2, lit, turn)


def centred(k, count):
    """Where the k-th of `count` things in a row lies, in steps from the middle of the row."""
    return k - (count - 1) / 2


def winding(scene, amplitude, wavelength, centre=0.0):
    """A smooth random line across the picture: a point every 5 metres."""
    first = scene.uniform(0, 6.3)
    second = scene.uniform(0, 6.3)
    points = []
    for x in range(-REACH, REACH + 1, 5):
        wave = math.sin(x / wavelength + first) + 0.4 * math.sin(2.3 * x / wavelength + second)
        points.append(complex(x, centre + amplitude * wave))
    return points


def across(y=0, turn=1):
    """Both ends of a straight line across the picture, `y` metres beside the middle.

    `turn` is its direction: a number of the length 1, by which the points are multiplied.
    """
    return [turn * complex(-FAR, y), turn * complex(FAR, y)]


# Roads and what drives on them

LANE = 3.6  # metres


def road(scene, y, width, turn=1, middle=YELLOW, kerb=True):
    """A street `y` metres beside the middle, with dashes in the colour `middle` or with none."""
    start, end = across(y, turn)
    if kerb:
        scene.line([start, end], width + 3, scene.concrete)
    scene.line([start, end], width, scene.asphalt)
    if middle:
        scene.dashes(start, end, 0.4, middle, 4, 4)


def traffic(scene, y, turn, density):
    """Cars and some lorries along a lane."""
    x = -80 + scene.uniform(0, 15)
    while x < 80:
        place = turn * complex(x, y)
        if scene.chance(0.15):
            lorry = scene.choice((WHITE, (150, 60, 50), (120, 130, 150)))
            scene.box(place, 14, 2.6, lorry, cmath.phase(turn), 3)
        else:
            scene.car(place, cmath.phase(turn))
        x += scene.uniform(9, 40) / density


def carriageways(scene, lanes, gap, density):
    """Two one-way roads side by side: solid edges, dashed lanes, no crossing.

    Returns the width of both and of the gap.
    """
    width = lanes * LANE + 4
    for side in (-1, 1):
        y = side * (gap / 2 + width / 2)
        scene.line(across(y), width, scene.asphalt)
        scene.line(across(y - side * lanes * LANE / 2), 0.45, YELLOW)
        scene.line(across(y + side * lanes * LANE / 2), 0.45, WHITE)
        for k in range(1, lanes):
            scene.dashes(*across(y + (k - lanes / 2) * LANE), 0.45, WHITE, 3, 6)
        for k in range(lanes):
            traffic(scene, y + (k + 0.5 - lanes / 2) * LANE, 1, density)
    return gap + 2 * width


def roadside(scene):
    """What lies beside a great road: patches of grass and soil, a few trees."""
    scene.fill(scene.choice((scene.grass, scene.soil, scene.tint(scene.grass, 25))))
    for _ in range(8):
        place = scene.anywhere()
        radius = scene.uniform(5, 12)
        scene.blob(place, radius, scene.tint(scene.choice((scene.grass, scene.soil)), 10))
    scene.trees(scene.choice((3, 10, 20)), 1.2, 3.2)


def freeway(scene):
    """Two carriageways with grass or concrete between them, sometimes with a ramp that leaves."""
    roadside(scene)
    gap = scene.choice((1.5, 3, 8, 14))
    barrier = gap < 5
    if barrier:
        scene.line(across(), gap, scene.concrete)
    lanes = scene.choice((2, 3, 4))
    width = carriageways(scene, lanes, gap, scene.uniform(0.4, 1.6))
    if barrier:
        scene.line(across(), 0.9, lighter(scene.concrete, 20))
    if scene.chance(0.35):
        ramp = [complex(x, width / 2 + 3 + 0.004 * max(0, x + 30) ** 2) for x in range(-80, 81, 8)]
        scene.line(ramp, 7, scene.asphalt)
        scene.line([point + 3j for point in ramp], 0.4, WHITE)


def overpass(scene):
    """A freeway, and a road on a bridge across it."""
    roadside(scene)
    below = scene.choice((2, 2, 3))
    gap = scene.choice((2, 6, 10))
    carriageways(scene, below, gap, scene.uniform(0.4, 1.4))

    turn = polar(1, scene.uniform(1.1, 2.04))
    lanes = scene.choice((2, 2, 4, 6))
    width = lanes * LANE + 3
    bridge = across(turn=turn)
    for part in (0.5, 1):
        scene.line([end + scene.shadow * 9 * part for end in bridge], width, scene.dark)
    scene.line(bridge, width + 1.8, lighter(scene.concrete, 22))
    deck = scene.tint(scene.choice((scene.asphalt, scene.concrete)), 12)
    scene.line(bridge, width, deck)
    scene.line(bridge, 0.6, YELLOW)
    for k in range(1, lanes):
        if k != lanes // 2:
            scene.dashes(*across((k - lanes / 2) * LANE, turn), 0.45, WHITE, 3, 6)
    for k in range(lanes):
        y = (k + 0.5 - lanes / 2) * LANE
        traffic(scene, y, turn, scene.uniform(0.3, 1.2))


def intersection(scene):
    """Two streets that cross, houses at the corners, cars that wait."""
    scene.fill(scene.choice((scene.grass, scene.soil, scene.concrete)))
    scene.trees(scene.choice((4, 10)), 1.5, 3.2)
    bend = polar(1, UPRIGHT + scene.uniform(-0.25, 0.25))
    first = scene.choice((9, 12, 16, 19))
    second = scene.choice((9, 12, 16, 19))
    for corner in (1 + 1j, 1 - 1j, -1 + 1j, -1 - 1j):
        if scene.chance(0.7):
            corner_house(scene, corner)

    for width, turn in ((first, 1), (second, bend)):
        scene.line(across(turn=turn), width + 4, scene.concrete)
    for width, turn in ((first, 1), (second, bend)):
        scene.line(across(turn=turn), width, scene.asphalt)
    zebra = scene.chance(0.55)
    for width, other, turn in ((first, second, 1), (second, first, bend)):
        for way in (turn, -turn):
            approach(scene, way, width, other / 2 + 3, zebra)
    if scene.chance(0.4):
        place = complex(scene.uniform(-3, 3), scene.uniform(-3, 3))
        scene.car(place, scene.uniform(0, 6.3))


def corner_house(scene, corner):
    place = complex(corner.real * scene.uniform(27, 34), corner.imag * scene.uniform(27, 34))
    if scene.chance(0.5):
        scene.house(place, scene.uniform(12, 18), scene.uniform(9, 13), scene.choice((0, UPRIGHT)))
    else:
        length = scene.uniform(14, 24)
        width = scene.uniform(12, 20)
        scene.box(place, length, width, scene.choice(FLAT_ROOFS), 0, scene.uniform(4, 9))


def approach(scene, way, width, stop, zebra):
    """One arm of a crossing in the direction `way`: markings at `stop` metres, cars that wait."""
    if zebra:
        for k in range(int(width / 1.6)):
            y = (k + 0.5) * 1.6 - width / 2
            scene.line([way * complex(stop - 1.6, y), way * complex(stop + 1.4, y)], 0.7, WHITE)
    else:
        for x, thick in ((stop, 0.6), (stop - 2, 0.4)):
            scene.line([way * complex(x, -width / 2), way * complex(x, width / 2)], thick, WHITE)
    scene.line([way * (stop + 2.4), way * FAR], 0.6, YELLOW)
    if width > 13:
        for y in (-width / 4, width / 4):
            scene.dashes(way * complex(stop + 3, y), way * complex(FAR, y), 0.4, WHITE, 3, 4)
    for k in range(scene.choice((0, 1, 2, 3))):
        scene.car(way * complex(stop + 6 + 8 * k, width / 4), cmath.phase(way))


# Fields, woods and shores


@dataclass
class Crop:
    plants: tuple  # a colour, as is the soil between the rows
    soil: tuple
    pitch: float  # metres from row to row


def agricultural(scene):
    """One field of slanting rows, or two with a lane between them."""
    two_fields = scene.chance(0.4)
    crop = any_crop(scene)
    slant = polar(1, scene.uniform(-0.4, 0.4))
    if two_fields:
        field(scene, crop, 0, 110)
        field(scene, any_crop(scene), -110, 0)
        scene.line([-90j, 90j], scene.uniform(3, 5), scene.soil)
    else:
        field(scene, crop, -FAR, FAR, slant)
    if scene.chance(0.15):
        road(scene, scene.uniform(25, 45), 5, 1j, middle=None, kerb=False)


def any_crop(scene):
    wheat = (196, 172, 104)
    clover = (120, 136, 72)
    ploughed = (104, 82, 62)
    stubble = (150, 132, 84)
    colours = (scene.grass, scene.soil, scene.leaf, wheat, clover, ploughed, stubble)
    plants, soil = scene.random.sample(colours, 2)
    return Crop(plants, soil, scene.uniform(2.2, 6.5))


def field(scene, crop, left, right, slant=1):
    y = -90.0
    while y < 90:
        begin = [complex(left, y) * slant, complex(left, y + crop.pitch) * slant]
        end = [complex(right, y) * slant, complex(right, y + crop.pitch) * slant]
        scene.polygon([begin[0], end[0], end[1], begin[1]], scene.tint(crop.plants, 7))
        furrow = [(end[1] + end[0]) / 2, (begin[0] + begin[1]) / 2]
        width = crop.pitch * scene.uniform(0.4, 0.55)
        scene.line(furrow, width, scene.tint(crop.soil, 7))
        y += crop.pitch


def chaparral(scene):
    """Dry ground with many small bushes, sometimes a track."""
    ground = (scene.soil, scene.tint(scene.soil, 30), scene.tint((192, 172, 134), 20), scene.grass)
    scene.fill(scene.choice(ground))
    for _ in range(14):
        place = scene.anywhere()
        radius = scene.uniform(4, 12)
        scene.blob(place, radius, scene.tint(scene.soil, 10))
    if scene.chance(0.25):
        track = winding(scene, 10, 25)
        width = scene.uniform(1.5, 3)
        scene.line(track, width, scene.tint((204, 184, 148), 10))
    bush = scene.choice((scene.leaf, (84, 88, 58), (66, 78, 54), (98, 94, 62), (58, 62, 48)))
    for _ in range(scene.random.randrange(90, 190)):
        scene.tree(scene.anywhere(), scene.choice((0.8, 1.0, 1.3, 1.7, 2.3)), bush)


def forest(scene):
    """Crown beside crown, in autumn some of them yellow and red."""
    scene.fill(darker(scene.leaf, 0.5))
    autumn = scene.chance(0.2)
    crowns = [scene.tint(scene.leaf, 16) for _ in range(3)]
    if autumn:
        crowns += [(168, 120, 50), (150, 84, 46)]
    elif scene.chance(0.3):
        crowns += [scene.grass]
    small, large = scene.choice(((1.6, 3.0), (2.2, 4.2), (3, 5.5)))
    for _ in range(int(1500 / (small + large))):
        place = scene.anywhere()
        scene.tree(place, scene.uniform(small, large), scene.choice(crowns))
    for _ in range(scene.choice((0, 0, 1))):
        clearing = scene.anywhere()
        scene.blob(clearing, scene.uniform(4, 8), scene.grass)


def river(scene):
    """Meadows, a bank, the water with a deeper middle, perhaps islands of sand, trees along it."""
    scene.fill(scene.choice((scene.grass, scene.soil, scene.leaf, scene.grass)))
    for _ in range(12):
        place = scene.anywhere()
        radius = scene.uniform(4, 12)
        scene.blob(place, radius, scene.tint(scene.choice((scene.grass, scene.soil)), 12))
    width = scene.uniform(10, 24)
    course = winding(scene, scene.uniform(8, 16), scene.uniform(12, 22))
    wooded = scene.choice((20, 60, 110))

    bank = width + scene.uniform(3, 7)
    ground = scene.choice((scene.soil, scene.leaf, (206, 190, 156)))
    scene.line(course, bank, scene.tint(ground, 12))
    scene.line(course, width, scene.water)
    for point in course:
        aside = complex(scene.uniform(-2, 2), scene.uniform(-2, 2))
        scene.disc(point + aside, width / 2, scene.water)
    deep = [point + 1j * width * 0.12 for point in course]
    scene.line(deep, width * 0.4, lighter(scene.water, -8))
    for _ in range(scene.choice((0, 0, 1, 2))):
        island = scene.choice(course) + 1j * scene.uniform(-0.5, 0.5) * width
        scene.blob(island, scene.uniform(2, 4), (200, 184, 150), 0.3)
    for _ in range(wooded):
        foot = scene.choice(course)
        along = scene.uniform(-4, 4)
        aside = scene.choice((-1, 1)) * (width / 2 + scene.uniform(1.5, 30))
        scene.tree(foot + complex(along, aside), scene.uniform(1.4, 3.6))


def beach(scene):
    """Sand, the sea that gets deeper, surf, parasols, and sometimes trees behind."""
    sands = ((220, 202, 164), (200, 180, 142), (186, 170, 148), (232, 220, 192))
    sand = scene.tint(scene.choice(sands), 8)
    scene.fill(sand)
    amplitude = scene.uniform(1.5, 6)
    wavelength = scene.uniform(14, 30)
    shore = winding(scene, amplitude, wavelength, scene.uniform(-12, 14))
    seas = ((40, 110, 128), (52, 96, 116), (70, 130, 132), (62, 92, 96))
    sea = scene.tint(scene.choice(seas), 10)

    beyond(scene, shore, -5, darker(sand, 0.8))
    beyond(scene, shore, -1.5, WHITE)
    for part in range(5):
        deeper = tuple((sea[i] * (part + 3) + sand[i] * (4 - part)) // 7 for i in range(3))
        beyond(scene, shore, 7 * part, deeper)
    breakers = scene.choice((1, 2, 3, 4))
    for offset in scene.random.sample(range(4, 50, 5), breakers):
        left = scene.random.randrange(0, 18)
        right = left + scene.random.randrange(6, 14)
        breaker = [point + 1j * offset for point in shore[left:right]]
        scene.line(breaker, scene.uniform(0.8, 2.6), WHITE)

    for _ in range(scene.choice((0, 4, 12, 20))):
        place = scene.anywhere()
        if place.imag < shore[0].imag - 14:
            scene.disc(place + scene.shadow * 1.6, 1.4, darker(sand, 0.67))
            scene.disc(place, 1.4, scene.choice(CARS[2:] + (WHITE, YELLOW)))
    if scene.chance(0.5):
        behind = scene.uniform(-46, -28)
        for _ in range(40):
            place = complex(scene.uniform(-70, 70), behind - scene.uniform(0, 25))
            scene.tree(place, scene.uniform(1, 2.8))


def beyond(scene, shore, offset, colour):
    """Everything that lies more than `offset` metres outside the shore."""
    edge = [point + 1j * (offset + scene.uniform(-0.6, 0.6)) for point in shore]
    scene.polygon(edge + [90 + 110j, -90 + 110j], colour)


# Homes


def denseresidential(scene):
    """Houses close to one another on small lots."""
    frontage = scene.uniform(10.5, 15)
    depth = scene.uniform(14.5, 19)
    homes(scene, frontage, depth, scene.uniform(8.8, 10.5), scene.uniform(8.5, 11))


def mediumresidential(scene):
    """Houses with a garden each."""
    frontage = scene.uniform(15.5, 25)
    depth = scene.uniform(20, 28)
    homes(scene, frontage, depth, scene.uniform(12, 15), scene.uniform(9, 11.5))


def sparseresidential(scene):
    """Few large houses among trees."""
    frontage = scene.uniform(29, 60)
    depth = scene.uniform(33, 55)
    homes(scene, frontage, depth, scene.uniform(13, 20), scene.uniform(9, 13))
    scene.trees(scene.choice((4, 12, 30)), 2, 4.5)


def homes(scene, frontage, depth, length, width):
    """Streets with a house every `frontage` metres on both sides, on lots `depth` metres deep."""
    scene.trees(10, 1.5, 4)
    street = scene.uniform(6, 9)
    roofs = scene.random.sample(ROOFS, 4)
    pitch = street + 2 * depth
    start = scene.uniform(0, frontage)
    nearest = round(-depth / 2 - street / 2) * scene.choice((-1, 1))
    further = int(80 / pitch) + 1
    for k in range(-further, further + 1):
        y = nearest + k * pitch
        road(scene, y, street, middle=None)
        for side in (-1, 1):
            kerb = y + side * street / 2
            x = start - REACH - frontage
            while x < REACH + frontage:
                here = complex(x, y + side * (street / 2 + 1.5 + depth * scene.uniform(0.4, 0.5)))
                if scene.sees(here, max(frontage, depth)):
                    lot(scene, here, frontage, depth, kerb, side)
                    home(scene, here, length, width, roofs)
                x += frontage * scene.uniform(0.94, 1.06)
            if scene.chance(0.5):
                parked_cars(scene, y + side * (street / 2 - 1))


def lot(scene, here, frontage, depth, kerb, side):
    """What is around a house: a lawn of its own, a drive, sometimes a car and a pool, trees."""
    lawn = here + 1j * side * depth * 0.1
    scene.box(lawn, frontage * 0.92, depth * 0.8, scene.tint(scene.grass, 12))
    drive = here.real + min(frontage * 0.28, 8)
    scene.line([complex(drive, kerb), complex(drive, here.imag)], 3.2, scene.concrete)
    if scene.chance(0.3):
        scene.car(complex(drive, (kerb + here.imag) / 2), UPRIGHT)
    behind = here + 1j * side * depth * 0.32
    if scene.chance(0.16):
        scene.blob(behind, 3.0, (84, 170, 190), 0.2, 8)
    for _ in range(int(scene.uniform(0.4, 2.6) + frontage * depth / 700)):
        aside = complex(scene.uniform(-0.45, 0.45) * frontage, scene.uniform(-0.2, 0.12) * depth)
        scene.tree(behind + aside, scene.uniform(1.4, 3.4))


def home(scene, here, length, width, roofs):
    length *= scene.uniform(0.85, 1.12)
    width *= scene.uniform(0.85, 1.1)
    turn = 0 if scene.chance(0.8) else UPRIGHT
    scene.house(here, length, width, turn, scene.choice(roofs))


def parked_cars(scene, y):
    for x in range(-66, 70, scene.choice((9, 14, 22))):
        scene.car(complex(x + scene.uniform(-3, 3), y), 0)


def mobilehomepark(scene):
    """Long light boxes in slanting rows along narrow lanes, with a car or a tree beside them."""
    scene.fill(scene.choice((scene.grass, scene.soil, scene.concrete, scene.soil)))
    length = scene.uniform(14, 18)
    width = scene.uniform(4.4, 5.6)
    pitch = width + scene.uniform(4.5, 7.5)
    lane = scene.uniform(5, 7)
    slant = scene.choice((-1, 1)) * scene.uniform(0.0, 0.5) + UPRIGHT
    depth = length + scene.uniform(2, 5)
    for k in range(-3, 4):
        y = k * (2 * depth + lane)
        scene.line(across(y), lane, scene.asphalt)
        for side in (-1, 1):
            x = -REACH + scene.uniform(0, pitch)
            while x < REACH:
                here = complex(x, y + side * (lane / 2 + depth / 2))
                if scene.sees(here, length) and scene.chance(0.94):
                    mobile_home(scene, here, length, width, slant)
                    beside = here + pitch / 2
                    if scene.chance(0.4):
                        scene.car(beside - 1j * side * length * 0.25, slant)
                    elif scene.chance(0.4):
                        scene.tree(beside + 1j * side * length * 0.2, scene.uniform(1, 2.2))
                x += pitch


def mobile_home(scene, here, length, width, turn):
    roofs = (
        (226, 226, 222), (206, 202, 192), (190, 186, 184),
        (168, 160, 150), (214, 204, 186), (184, 196, 200),
    )
    roof = scene.tint(scene.choice(roofs), 8)
    scene.box(here, length * scene.uniform(0.85, 1), width, roof, turn, 2.6)
    ridge = polar(length * 0.4, turn)
    scene.line([here - ridge, here + ridge], 0.4, darker(roof, 0.83))


# Town and industry


def buildings(scene):
    """Blocks with flat roofs between streets, trees and parked cars."""
    scene.fill(scene.choice((scene.asphalt, scene.concrete, scene.grass, scene.asphalt)))
    for turn in (1, 1j):
        if scene.chance(0.75):
            y = scene.uniform(34, 44) * scene.choice((-1, 1))
            road(scene, y, scene.uniform(8, 12), turn)
    scene.trees(scene.choice((0, 4, 9)))
    for row in (-1, 1):
        for k in range(scene.choice((3, 6, 9))):
            place = complex(-34 + k * 8 + scene.uniform(-1, 1), row * 3)
            scene.car(place, scene.choice((0, UPRIGHT)))
    columns, rows = scene.choice(((1, 1), (2, 1), (2, 2), (3, 1), (3, 2)))
    for column in range(columns):
        for row in range(rows):
            cell = complex(centred(column, columns) * 76 / columns, centred(row, rows) * 76 / rows)
            length = 76 / columns * scene.uniform(0.6, 0.88)
            width = 76 / rows * scene.uniform(0.5, 0.85)
            block(scene, cell, length, width, scene.uniform(5, 11))


def block(scene, centre, length, width, height):
    """A flat roof with a parapet and machines on top; some have a second wing or a court."""
    roof = scene.tint(scene.choice(FLAT_ROOFS), 10)
    parapet = lighter(roof, 26)
    wings = [(centre, length, width)]
    if scene.chance(0.4):
        wings.append((centre + complex(length * 0.3, width * 0.25), length * 0.4, width * 1.1))
    for place, long, wide in wings:
        scene.box(place, long, wide, parapet, 0, height)
        scene.box(place, long - 1.6, wide - 1.6, roof)
    if scene.chance(0.25):
        court = scene.choice((scene.dark, scene.grass, (70, 90, 110)))
        scene.box(centre, length * 0.4, width * 0.4, court)
    for _ in range(scene.random.randrange(2, 8)):
        aside = complex(scene.uniform(-0.4, 0.4) * length, scene.uniform(-0.4, 0.4) * width)
        long = scene.uniform(2, 5)
        wide = scene.uniform(2, 4)
        machine = scene.choice(((120, 120, 122), WHITE, (90, 92, 96)))
        scene.box(centre + aside, long, wide, machine, 0, 1.8)


def parkinglot(scene):
    """Rows of stalls, most of them taken; some have islands with trees, or a store beside them."""
    scene.fill(scene.asphalt)
    stall = 2.8
    deep = 5.2
    aisle = scene.uniform(6, 8)
    busy = scene.uniform(0.6, 0.97)
    paint = scene.choice((WHITE, YELLOW, WHITE))
    islands = scene.chance(0.45)
    for k in range(-5, 6):
        y = k * (2 * deep + aisle)
        if abs(y) > 66:
            continue
        middle = [complex(-80, y), complex(80, y)]
        if islands:
            scene.line(middle, 1.8, scene.grass)
        else:
            scene.line(middle, 0.5, paint)
        for j in range(-25, 26):
            x = j * stall
            if not scene.sees(complex(x, y), 6):
                continue
            scene.line([complex(x, y - deep), complex(x, y + deep)], 0.3, paint)
            for side in (-1, 1):
                if islands and j % 12 == 0:
                    scene.tree(complex(x + stall / 2, y + side * deep * 0.5), 1.7)
                elif scene.chance(busy):
                    away = deep / 2 + scene.uniform(-0.3, 0.3)
                    place = complex(x + stall / 2, y + side * away)
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
        scene.line([complex(x, -80), complex(x, 80)], 1.5, scene.tint(scene.soil, 20))
    count, largest = scene.choice(((1, 22), (2, 16), (4, 14), (4, 11), (6, 9), (9, 8)))
    columns = math.ceil(math.sqrt(count))
    rows = math.ceil(count / columns)
    pitch = 2 * largest * scene.uniform(1.2, 1.5)
    scene.line([complex(-60, -pitch / 2), complex(60, -pitch / 2)], 1.0, (120, 118, 112))
    scene.trees(scene.choice((0, 0, 5)), 1.5, 3)
    if scene.chance(0.3):
        scene.car(scene.anywhere(), scene.uniform(0, 3))
    for k in range(count):
        column = centred(k % columns, columns)
        row = centred(k // columns, rows)
        centre = complex(column * pitch, row * pitch)
        radius = largest
        if count < 5:
            radius *= scene.uniform(0.75, 1.0)
        tank(scene, centre, radius, scene.tint(metal, 10))


def tank(scene, centre, radius, metal):
    """A tank with a shadow, a rim, a roof with or without ribs, and stairs around it."""
    for part in (0.35, 0.7, 1):
        scene.disc(centre + scene.shadow * 9 * part, radius, scene.dark)
    scene.disc(centre, radius, darker(metal, 0.8))
    sun = -scene.shadow / abs(scene.shadow)
    scene.disc(centre, radius * 0.94, metal)
    ribs = scene.choice((0, 0, 8, 12))
    for k in range(ribs):
        rib = polar(radius * 0.9, 6.283 * k / ribs)
        scene.line([centre, centre + rib], 0.3, darker(metal, 0.88))
    floating_roof = scene.chance(0.35)
    if floating_roof:  # it lies deep: the wall's shadow falls inside
        scene.disc(centre, radius * 0.9, darker(metal, 0.5))
        scene.disc(centre - sun * radius * 0.16, radius * 0.76, darker(metal, 0.83))
    else:
        scene.disc(centre + sun * radius * 0.3, radius * 0.5, lighter(metal, 14))
    stairs = [centre + polar(radius, 0.4 * k + abs(centre)) for k in range(5)]
    scene.line(stairs, 0.8, (110, 106, 100))


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
        if abs(x) > 62:
            continue
        scene.line([complex(x, -80), complex(x, quay)], 2.2, planks)
        y = quay - 5
        while y > -68:
            for side in (-1, 1):
                moored(scene, complex(x, y), side, length, berth, planks)
            y -= berth
    land = [complex(-90, quay), complex(90, quay), 90 + 120j, -90 + 120j]
    scene.polygon(land, scene.choice((scene.concrete, scene.asphalt)))
    for x in range(-60, 61, 5):
        if scene.chance(0.5):
            scene.car(complex(x, quay + 6), UPRIGHT)


def moored(scene, pier, side, length, berth, planks):
    """A berth on one side of a pier: a narrow jetty, and mostly a boat, seldom turned round."""
    place = pier + side * (length / 2 + 1.8)
    if not scene.sees(place, length):
        return
    jetty = pier + 1j * berth / 2
    scene.line([jetty, jetty + side * length * 0.8], 0.8, planks)
    if scene.chance(0.85):
        long = length * scene.uniform(0.75, 1.0)
        turned_round = scene.chance(0.2)
        outwards = (side > 0) != turned_round
        boat(scene, place, long, 0 if outwards else math.pi)


def boat(scene, centre, length, turn):
    """A hull with its shadow on the water, a cabin, sometimes the shadow of a mast."""
    bow = polar(length / 2, turn)
    beam = polar(length * 0.17, turn + UPRIGHT)
    hull = [bow, bow * 0.3 + beam, -bow + beam * 0.9, -bow - beam * 0.9, bow * 0.3 - beam]
    shadow = [centre + point + scene.shadow * 1.2 for point in hull]
    scene.polygon(shadow, darker(scene.water, 0.5))
    scene.polygon([centre + point for point in hull], scene.tint(WHITE, 14))
    cabins = ((40, 60, 110), (150, 120, 84), (190, 196, 200), (120, 40, 40), (80, 90, 96))
    scene.polygon([centre + point * 0.55 - bow * 0.15 for point in hull], scene.choice(cabins))
    if scene.chance(0.3):
        mast = centre + bow * 0.2
        scene.line([mast, mast + scene.shadow * length * 0.5], 0.3, scene.dark)


def airplane(scene):
    """An apron with joints and a yellow line, sometimes a hangar, aeroplanes, cars around them."""
    scene.fill(scene.choice((scene.concrete, scene.asphalt)))
    for x in range(-70, 71, 14):
        scene.line([complex(x, -80), complex(x, 80)], 0.3, scene.tint(scene.concrete, 25))
    scene.line(winding(scene, 6, 40, scene.uniform(-30, 30)), 0.8, YELLOW)
    if scene.chance(0.35):
        scene.box(complex(0, 58), 160, 40, scene.choice(FLAT_ROOFS), 0, 6)
    count = scene.choice((1, 1, 2, 3))
    for k in range(count):
        if count == 1:
            length = scene.uniform(28, 42)
            heading = scene.uniform(-0.3, 0.3) + scene.uniform(0, 6.3)
        else:
            length = scene.uniform(17, 26)
            heading = scene.uniform(-0.3, 0.3) + UPRIGHT
        centre = complex(centred(k, count) * 30, scene.uniform(-6, 6))
        plane(scene, centre, length, polar(1, heading))
    for _ in range(scene.choice((1, 3, 5))):
        place = scene.anywhere()
        scene.car(place, scene.uniform(0, 3), scene.uniform(3, 8))


def plane(scene, centre, length, nose):
    """An aeroplane that points in the direction `nose`: shadow, wings, tail, engines, hull.

    Its outlines are in lengths of it, from tail to nose, and show its right side.
    """
    body = scene.tint(scene.choice((WHITE, WHITE, (200, 204, 210), (176, 180, 188))), 8)
    wing = length * scene.uniform(0.42, 0.52)
    stripe = scene.choice(((40, 60, 130), (170, 40, 40), (30, 110, 90), (200, 120, 30), body))
    span = wing / length
    sweep = scene.uniform(0.1, 0.22)
    wings = [(0.12, 0), (0.1 - sweep, span), (0.03 - sweep, span), (-0.08, 0.04), (-0.08, 0)]
    tail = [(-0.36, 0), (-0.45, 0.17), (-0.49, 0.17), (-0.46, 0)]
    hull = [(0.5, 0), (0.47, 0.025), (0.4, 0.05), (-0.3, 0.05), (-0.5, 0.012)]

    def both_sides(outline, colour, offset=0j):
        right = [complex(x, y) for x, y in outline]
        left = [complex(x, -y) for x, y in reversed(outline)]
        scene.polygon([centre + offset + nose * length * point for point in right + left], colour)

    for shape in (wings, tail, hull):
        both_sides(shape, scene.dark, scene.shadow * 2.6)
    both_sides(wings, darker(body, 0.9))
    both_sides(tail, stripe)
    two_engines = length < 26 or scene.chance(0.6)
    for side in (0.16, -0.16) if two_engines else (0.14, -0.14, 0.28, -0.28):
        front = complex(0.1 - abs(side) * 0.4, side)
        back = complex(-0.02 - abs(side) * 0.4, side)
        engine = [centre + nose * length * front, centre + nose * length * back]
        scene.line(engine, length * 0.045, (120, 122, 128))
    both_sides(hull, body)
    fin = [centre + nose * length * -0.5, centre + nose * length * -0.36]
    scene.line(fin, length * 0.02, stripe)


def runway(scene):
    """A broad strip with edges and dashes; some with its end, with skid marks, with a taxiway."""
    scene.fill(scene.choice((scene.grass, scene.soil, scene.tint(scene.grass, 20))))
    width = scene.uniform(26, 44)
    y = scene.uniform(-8, 8)
    strip = scene.choice((scene.asphalt, scene.concrete))
    shoulder = width + scene.choice((0, 4, 12))
    scene.line([complex(-95, y), complex(95, y)], shoulder, scene.tint(scene.asphalt, 16))
    scene.line([complex(-95, y), complex(95, y)], width, strip)
    for side in (-1, 1):
        scene.line([complex(x, y + side * width * 0.45) for x in (-95, 95)], 0.9, WHITE)
    ends_here = scene.chance(0.6)
    end = scene.uniform(-38, -8) if ends_here else -120
    if scene.chance(0.6):
        skid_marks(scene, y, width, darker(strip, 0.75))
    begin = complex(max(end + 30, -90), y)
    scene.dashes(begin, complex(90, y), 1.1, WHITE, scene.uniform(14, 22), scene.uniform(9, 14))
    if ends_here:
        threshold(scene, end, y, width)
    elif scene.chance(0.7):
        touchdown_zone(scene, y)
    if scene.chance(0.3):
        edge = y + width / 2
        taxiway = [complex(20, edge - 1), complex(45, edge + 14), complex(60, 80)]
        scene.line(taxiway, 14, scene.asphalt)
        scene.line(taxiway, 0.6, YELLOW)


def skid_marks(scene, y, width, rubber):
    for _ in range(5):
        middle = complex(scene.uniform(-10, 50), y + scene.uniform(-0.2, 0.2) * width)
        mark = [middle - scene.uniform(10, 30), middle + scene.uniform(10, 30)]
        scene.line(mark, scene.uniform(0.6, 1.8), rubber)


def threshold(scene, end, y, width):
    """The end of a runway: a white line, bars behind it, chevrons before it."""
    scene.line([complex(end, y - width / 2), complex(end, y + width / 2)], 1.2, WHITE)
    bars = scene.choice((6, 8, 10))
    for k in range(bars):
        aside = (k + 0.5 - bars / 2) * width * 0.84 / bars
        bar = [complex(end + 3, y + aside), complex(end + 21, y + aside)]
        scene.line(bar, width * 0.42 / bars, WHITE)
    if scene.chance(0.5):
        for chevron in range(1, 5):
            tip = end - 12 * chevron
            arms = [complex(tip, y - width / 2), complex(tip + 10, y), complex(tip, y + width / 2)]
            scene.line(arms, 1.0, YELLOW)


def touchdown_zone(scene, y):
    for side in (-1, 1):
        for k in range(3):
            bar = y + side * (6 + 2.6 * k)
            scene.line([complex(-12, bar), complex(8, bar)], 1.5, WHITE)


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

    def fan(radius, opening, colour):
        edge = [home_plate + polar(radius, opening * k / 12) for k in range(-12, 13)]
        scene.polygon([home_plate] + edge, colour)

    fan(base * scene.uniform(3, 3.6), math.pi / 4 + 0.09, lawn)
    fan(base * 1.72, math.pi / 4 + 0.05, dirt)
    corners = ((1, math.pi / 4), (1.414, 0), (1, -math.pi / 4))
    if scene.chance(0.8):
        inner = home_plate + 0.1 * base
        infield = [inner + polar(base * 0.86 * reach, turn) for reach, turn in corners]
        scene.polygon([inner] + infield, lawn)
    scene.disc(home_plate + base * 0.66, 2.8, dirt)
    scene.disc(home_plate, 4.2, dirt)
    for side in (1, -1):
        scene.line([home_plate, home_plate + polar(base * 3.2, side * math.pi / 4)], 0.5, WHITE)
    for reach, turn in corners:
        scene.box(home_plate + polar(base * reach, turn), 1.3, 1.3, WHITE, math.pi / 4)

    backstop = [home_plate + polar(7, turn) for turn in (2.2, 2.7, math.pi, -2.7, -2.2)]
    scene.line(backstop, 0.8, scene.dark)
    for side in (1, -1):
        dugout = home_plate + polar(base * 0.62, side * (math.pi / 4 + 0.42))
        scene.box(dugout, 9, 2.4, scene.choice(FLAT_ROOFS), side * math.pi / 4, 2.5)
    for _ in range(scene.choice((0, 3, 6))):
        place = polar(scene.uniform(46, 60), scene.uniform(0, 6.3))
        scene.tree(place, scene.uniform(2, 4))


COURTS = (  # around the lines, within them
    ((72, 112, 84), (52, 92, 138)),
    ((150, 86, 66), (78, 118, 82)),
    ((96, 128, 96), (92, 124, 92)),
    ((66, 96, 140), (66, 96, 140)),
    ((130, 126, 120), (104, 116, 110)),
    ((178, 116, 82), (178, 116, 82)),
    ((84, 120, 90), (150, 88, 72)),
)


def tenniscourt(scene):
    """One to four courts in a fence, trees, sometimes a clubhouse."""
    scene.fill(scene.choice((scene.grass, scene.concrete, scene.asphalt, scene.soil)))
    scene.trees(scene.choice((3, 8, 16)), 1.8, 3.6)
    columns, rows = scene.choice(((1, 1), (2, 1), (2, 1), (3, 1), (2, 2)))
    around, inside = scene.choice(COURTS)
    around = scene.tint(around, 12)
    inside = scene.tint(inside, 12)
    wide = 17.0
    deep = 35.0
    scene.box(0j, columns * wide + 3, rows * deep + 3, around)
    for column in range(columns):
        for row in range(rows):
            middle = complex(centred(column, columns) * wide, centred(row, rows) * deep)
            court(scene, middle, inside)
    right = (columns * wide + 3) / 2
    top = (rows * deep + 3) / 2
    fence = [
        complex(-right, -top), complex(right, -top), complex(right, top), complex(-right, top),
        complex(-right, -top),
    ]
    scene.line(fence, 0.5, scene.dark)
    if scene.chance(0.5):
        clubhouse = complex(columns * wide / 2 + 14, scene.uniform(-15, 15))
        scene.house(clubhouse, scene.uniform(12, 18), 10, scene.choice((0, UPRIGHT)))


def court(scene, middle, colour):
    """Lines, and a net with its shadow."""
    scene.box(middle, 11.6, 24.4, colour)
    for x in (-5.5, -4.1, 4.1, 5.5):
        scene.line([middle + complex(x, -11.9), middle + complex(x, 11.9)], 0.6, WHITE)
    for y, half in ((-11.9, 5.5), (-6.4, 4.1), (6.4, 4.1), (11.9, 5.5)):
        scene.line([middle + complex(-half, y), middle + complex(half, y)], 0.6, WHITE)
    scene.line([middle - 6.4j, middle + 6.4j], 0.6, WHITE)
    net = [middle - 6.4, middle + 6.4]
    scene.line([end + 0.5 * scene.shadow for end in net], 0.8, scene.dark)
    scene.line(net, 0.4, WHITE)


def golfcourse(scene):
    """A mown fairway, a green with flag and bunkers, sometimes a pond and a path, trees."""
    greens = (scene.grass, (104, 146, 70), (124, 158, 80), (92, 134, 78))
    lush = scene.tint(scene.choice(greens), 10)
    scene.fill(scene.choice((scene.grass, scene.leaf, lighter(lush, -14))))
    amplitude = scene.uniform(7, 13)
    wavelength = scene.uniform(18, 30)
    course = winding(scene, amplitude, wavelength, scene.uniform(-8, 8))
    width = scene.uniform(18, 26)
    mown = [lighter(lush, 6), lighter(lush, 18)]
    for point in course:
        scene.disc(point, width / 2 + 0.8, lush)
    for k, point in enumerate(course):
        scene.disc(point, width / 2, mown[k // 2 % 2])

    hole = scene.choice(course[10:20])
    if scene.chance(0.4):
        aside = complex(scene.uniform(-16, 16), scene.uniform(22, 32) * scene.choice((-1, 1)))
        scene.blob(hole + aside, scene.uniform(8, 12), scene.water, 0.15, 20)
    collar = scene.uniform(10, 12)
    green = scene.uniform(7.5, 9)
    scene.blob(hole, collar, lighter(lush, 26), 0.1, 20)
    scene.blob(hole, green, lighter(lush, 44), 0.1, 20)
    sand = scene.tint((226, 208, 168), 12)
    for k in range(scene.random.randrange(3, 7)):
        bunker = hole + polar(scene.uniform(13, 16 + 3 * k), scene.uniform(0, 6.3))
        stretch = polar(scene.uniform(1.5, 3.4), scene.uniform(0, 3.1))
        for part in (-1, 0, 1):
            scene.blob(bunker + stretch * part, scene.uniform(2.6, 4.4), sand, 0.15, 10)
    scene.line([hole, hole + scene.shadow * 5], 0.5, scene.dark)
    scene.disc(hole, 0.8, scene.choice((WHITE, YELLOW, (200, 50, 40))))

    if scene.chance(0.6):
        aside = 1j * (width / 2 + 5) * scene.choice((-1, 1))
        scene.line([point + aside for point in course], 2, scene.concrete)
    for _ in range(scene.choice((10, 24, 40))):
        foot = scene.choice(course)
        along = scene.uniform(-4, 4)
        aside = scene.choice((-1, 1)) * scene.uniform(width / 2 + 8, 40)
        scene.tree(foot + complex(along, aside), scene.uniform(1.8, 4))


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
