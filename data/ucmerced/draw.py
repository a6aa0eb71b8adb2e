"""Draws small scenes from above: a stand-in for the UC Merced Land Use set.

It is for where that set cannot be downloaded. The pictures are no photographs of any place.

    python data/ucmerced/draw.py FOLDER

writes FOLDER/<class>/<class><number>.png, 100 of each of the 21 classes, named as in that set.

A picture begins as a map (`Scene`), whose season, sun and colours are chosen by lot. The method
of its class (`Land`) lays the ground and what lies and stands on it. Then an aeroplane photographs
it in some light. Season and light vary in every class: colour alone does not give it away.

A scene is laid out in metres with the origin in its middle, then turned, scaled and shifted as
a whole: a picture shows about the 77 m that one of the real set shows. Points and directions are
complex numbers: 1 is to the right, 1j is down. Whatever has a height throws its shadow.

The promises are those of `data/drawing.py`, which has what this program shares with other ones.
"""

import itertools
import math
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))  # data/, where drawing.py lies

from drawing import Camera, Sheet, command_line, darker, lighter, mixed, photographed, polar

SEED = 2010
PER_CLASS = 100
TILE = 77  # metres that a picture is wide, before scaling
FAR = 80  # metres from the middle: what crosses the picture begins and ends here
LANE = 3.6  # metres

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
PAINTS = ((232, 232, 232), (40, 42, 48), (176, 40, 36), (44, 72, 140), (150, 154, 160))
COURTS = ((52, 92, 138), (78, 118, 82), (150, 86, 66), (104, 116, 110), (178, 116, 82))

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
    land = Land(f"{SEED} {label} {number}", size)
    getattr(land, label)()
    return photographed(land, AEROPLANE)


def places(columns, rows, wide, deep):
    """The middles of so many fields, `wide` and `deep` metres large, around the origin."""
    for x, y in itertools.product(range(columns), range(rows)):
        yield complex((2 * x - columns + 1) * wide, (2 * y - rows + 1) * deep) / 2


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
        season = self.choice(SEASONS)
        self.grass, self.leaf, self.soil = (self.tint(colour, 14) for colour in season)
        self.asphalt = self.one_of(*ASPHALTS)
        self.concrete = self.one_of(*CONCRETES)
        self.water = self.one_of(*WATERS)
        self.dark = darker(self.asphalt, 0.4)  # where a shadow falls

    def at(self, point):
        place = point * self.axis + self.middle
        return place.real, place.imag

    def anywhere(self):
        """A point of the picture."""
        place = complex(self.uniform(0, self.canvas), self.uniform(0, self.canvas))
        return (place - self.middle) / self.axis

    def one_of(self, *colours):
        """One of these colours, a little changed."""
        return self.tint(self.choice(colours))

    def blob(self, centre, radius, colour):
        """A round patch with an uneven edge."""
        edge = [polar(radius * self.uniform(0.8, 1.2), angle) for angle in np.arange(0, 6.2, 0.4)]
        self.polygon([centre + point for point in edge], colour)

    def patches(self, *colours):
        """Ground in one of these colours, with patches of all of them."""
        self.fill(self.choice(colours))
        for _ in range(10):
            self.blob(self.anywhere(), self.uniform(4, 12), self.one_of(*colours))

    def strip(self, y, width, colour, turn=1, begin=-FAR, end=FAR, dash=2 * FAR, gap=0):
        """A line across the picture, `y` metres beside the middle, turned by the number `turn`."""
        for x in np.arange(begin, end, dash + gap):
            stop = min(x + dash, end)
            self.line([turn * complex(x, y), turn * complex(stop, y)], width, colour)

    def winding(self, amplitude, wavelength):
        """A smooth random line across the picture: a point every 5 metres."""
        x = np.arange(-75, 76, 5)
        wave = np.sin(x / wavelength + self.uniform(0, 6.3))
        wave += 0.4 * np.sin(2.3 * x / wavelength + self.uniform(0, 6.3))
        return x + 1j * (amplitude * wave + self.uniform(-10, 10))

    def shape(self, half, colour, centre, turn=1, height=0.0):
        """Half an outline and its mirror image, turned and scaled by `turn`, and the shadow."""
        outline = turn * np.array([*half, *np.conj(half[::-1])])
        if height:
            for lift in (height, 0.7 * height, 0.35 * height):
                self.polygon(centre + lift * self.shadow + outline, self.dark)
        self.polygon(centre + outline, colour)

    def box(self, centre, length, width, colour, turn=1, height=0.0):
        """A rectangle, `length` along the direction `turn`."""
        ends = [complex(length, width) / 2, complex(-length, width) / 2]
        self.shape(ends, colour, centre, turn, height)

    def dome(self, centre, radius, colour, height):
        """Something round, its shadow, and the side of it that the sun shines on."""
        if height:
            for lift in (height, height / 2):
                self.disc(centre + lift * self.shadow, radius, self.dark)
        self.disc(centre, radius, colour)
        towards_sun = -self.shadow / abs(self.shadow)
        self.disc(centre + 0.3 * radius * towards_sun, 0.55 * radius, lighter(colour, 16))

    def tree(self, centre, colour=None, smallest=1.6, largest=3.6):
        radius = self.uniform(smallest, largest)
        self.dome(centre, radius, self.tint(colour or self.leaf, 14), 0.8 * radius)

    def trees(self, *counts):
        """So many trees anywhere in the picture, one of these numbers."""
        for _ in range(self.choice(counts)):
            self.tree(self.anywhere())

    def car(self, centre, turn=1, length=4.6):
        self.box(centre, length, 2.1, self.choice(PAINTS), turn, 1)

    def house(self, centre, length, width, turn=1):
        """A gabled roof, its two sides in different light."""
        roof = self.one_of(*ROOFS)
        self.box(centre, length, width, roof, turn, 4.5)
        towards_sun = -1j if (self.shadow / turn).imag > 0 else 1j
        lit = centre + turn * towards_sun * width / 4
        self.box(lit, length, width / 2, lighter(roof, 24), turn)

    def lots(self, lane, colour, frontage, depth):
        """Lanes, and of each lot beside them the corner where it begins and the way into it."""
        pitch = lane + 2 * depth
        lanes = np.arange(self.uniform(-pitch, 0) - FAR, FAR + pitch, pitch)
        for y in lanes:
            self.strip(y, lane, colour)
        for y, side in itertools.product(lanes, (-1j, 1j)):
            for x in np.arange(self.uniform(-frontage, 0) - FAR, FAR, frontage):
                yield complex(x, y) + side * lane / 2, side

    def road(self, y, lanes, turn=1, begin=-FAR):
        """A road with edges, dashed lanes and traffic, `y` metres beside the middle."""
        edge = lanes * LANE / 2
        self.strip(y, 2 * edge + 3, self.asphalt, turn, begin)
        for k in range(lanes):
            left = y + k * LANE - edge
            self.strip(left, 0.5, WHITE, turn, begin, dash=3, gap=6)
            for x in np.arange(begin + self.uniform(3, 20), FAR, self.uniform(9, 25)):
                if self.chance(0.6):
                    length = self.choice((4.6, 4.6, 4.6, 13))
                    self.car(turn * complex(x, left + LANE / 2), turn, length)
        self.strip(y - edge, 0.5, YELLOW, turn, begin)
        self.strip(y + edge, 0.5, WHITE, turn, begin)

    def homes(self, frontage):
        """Streets with houses on lots of that frontage, each with a lawn, a drive and trees."""
        self.fill(self.grass)
        depth = 6 + 0.85 * frontage * self.uniform(0.9, 1.1)
        for kerb, side in self.lots(self.uniform(6, 9), self.asphalt, frontage, depth):
            house = kerb + frontage / 2 + side * depth * self.uniform(0.42, 0.52)
            self.box(house, 0.92 * frontage, 0.8 * depth, self.tint(self.grass, 12))
            self.line([kerb, kerb + frontage], 1.6, self.concrete)
            drive = kerb + 0.8 * frontage
            self.line([drive, drive + side * depth * 0.45], 3.2, self.concrete)
            if self.chance(0.5):
                self.car(drive + self.choice((4, depth / 4)) * side, side)
            for _ in range(int(self.uniform(0.4, 2.6) + frontage * depth / 700)):
                aside = complex(self.uniform(-0.45, 0.45) * frontage, self.uniform(-4, 4))
                self.tree(house + side * depth * 0.32 + aside)
            length = min(0.72 * frontage, 16) * self.uniform(0.85, 1.15)
            self.house(house, length, length * self.uniform(0.65, 0.95), self.choice((1, 1, 1j)))


class Land(Scene):
    """What there is to see: a method draws the class of the same name."""

    # Roads, and homes along them

    def freeway(self):
        """Two carriageways with grass between them."""
        self.patches(self.grass, self.soil)
        self.trees(3, 10, 20)
        lanes = self.choice((2, 3, 4))
        gap = self.choice((1.5, 3, 8, 14))
        for side in (-1, 1):
            self.road(side * (gap + lanes * LANE + 3) / 2, lanes)

    def overpass(self):
        """A freeway, and a road on a bridge across it."""
        self.freeway()
        turn = polar(1, self.uniform(1.1, 2.04))
        lanes = self.choice((2, 2, 4, 6))
        self.box(0, 2 * FAR, lanes * LANE + 5, lighter(self.concrete, 22), turn, 9)
        self.road(0, lanes, turn)

    def intersection(self):
        """Two streets that cross, with zebra crossings, and houses at the corners."""
        self.fill(self.choice((self.grass, self.soil, self.concrete)))
        self.trees(4, 10)
        for corner in places(2, 2, 60, 60):
            if self.chance(0.7):
                self.house(corner, self.uniform(12, 22), self.uniform(10, 18))
        bend = polar(1, self.uniform(1.32, 1.82))
        one, other = self.choice((2, 3, 4)), self.choice((2, 3, 4))  # lanes
        for more, colour in ((7, self.concrete), (3, self.asphalt)):
            self.strip(0, one * LANE + more, colour)
            self.strip(0, other * LANE + more, colour, bend)
        for way, lanes, across in ((1, one, other), (bend, other, one)):
            stop = across * LANE / 2 + 7
            for turn in (way, -way):
                self.road(0, lanes, turn, stop)
                for y in np.arange(0.8, lanes * LANE, 1.6) - lanes * LANE / 2:
                    self.strip(y, 0.7, WHITE, turn, stop - 4, stop - 1)

    def denseresidential(self):
        """Houses close to one another on small lots."""
        self.homes(self.uniform(10.5, 15))

    def mediumresidential(self):
        """Houses with a garden each."""
        self.homes(self.uniform(15.5, 25))

    def sparseresidential(self):
        """Few large houses among trees."""
        self.homes(self.uniform(29, 60))
        self.trees(4, 12, 30)

    def mobilehomepark(self):
        """Long light boxes in slanting rows along narrow lanes, cars beside them."""
        self.fill(self.choice((self.grass, self.soil, self.concrete, self.soil)))
        length = self.uniform(14, 18)
        pitch = self.uniform(9.5, 12.5)
        slant = polar(1, self.uniform(-0.5, 0.5))
        for kerb, side in self.lots(self.uniform(5, 7), self.asphalt, pitch, length + 3):
            home = kerb + side * (length / 2 + 1.5)
            roof = self.one_of(WHITE, *FLAT_ROOFS[:2])
            self.box(home, length * self.uniform(0.85, 1), 5, roof, side * slant, 2.6)
            if self.chance(0.4):
                self.car(home + pitch / 2, side * slant)

    # Fields, woods and shores

    def agricultural(self):
        """One field of rows, or two with a lane between them."""
        crops = (self.grass, self.soil, self.leaf, darker(self.soil, 0.75), (196, 172, 104))
        for begin in self.choice(((-FAR,), (-FAR, 0))):
            plants, soil = self.random.sample(crops, 2)
            pitch = self.uniform(2.2, 6.5)
            self.strip(0, 2 * FAR, plants, 1, begin)
            for y in np.arange(-FAR, FAR, pitch):
                self.strip(y, pitch / 2, self.tint(soil, 7), 1, begin)
            self.strip(-begin, 4, self.soil, 1j)

    def chaparral(self):
        """Dry ground with many small bushes."""
        self.patches(self.soil, self.tint(self.soil, 30), self.tint(SAND, 20))
        bush = self.choice((self.leaf, (84, 88, 58), (66, 78, 54), (98, 94, 62), (58, 62, 48)))
        for _ in range(self.random.randrange(90, 190)):
            self.tree(self.anywhere(), bush, 0.8, 2.2)

    def forest(self):
        """Crown beside crown, in autumn some of them yellow and red."""
        self.fill(darker(self.leaf, 0.5))
        autumn = [self.leaf, (168, 120, 50), (150, 84, 46)]
        crowns = autumn if self.chance(0.2) else [self.leaf]
        small = self.uniform(1.6, 3)
        for _ in range(int(600 / small)):
            self.tree(self.anywhere(), self.choice(crowns), small, 1.9 * small)

    def river(self):
        """Meadows, a bank, the water, trees along it."""
        self.patches(self.grass, self.soil, self.leaf, self.grass)
        width = self.uniform(10, 24)
        course = self.winding(self.uniform(8, 14), self.uniform(14, 24))
        self.line(course, width + 5, self.one_of(self.soil, self.leaf, SAND))
        self.line(course, width, self.water)
        for _ in range(self.choice((20, 60, 110))):
            aside = self.choice((-1j, 1j)) * (width / 2 + self.uniform(2, 30))
            self.tree(self.choice(course) + aside)

    def beach(self):
        """Sand, the sea that gets deeper, breakers, parasols."""
        sand = self.one_of(SAND, (200, 180, 142), (232, 220, 192))
        sea = self.one_of((40, 110, 128), (52, 96, 116), (70, 130, 132), (62, 92, 96))
        self.fill(sand)
        shore = self.winding(self.uniform(1.5, 6), self.uniform(14, 30))
        stripes = [(-5, darker(sand, 0.8)), (-1.5, WHITE)]
        stripes += [(7 * part, mixed(sea, sand, (4 - part) / 7)) for part in range(5)]
        for offset, colour in stripes:
            self.polygon([*(shore + 1j * offset), FAR + 110j, -FAR + 110j], colour)
        for _ in range(self.choice((1, 2, 3, 4))):
            left = self.random.randrange(18)
            breaker = shore[left : left + 10] + self.uniform(4, 50) * 1j
            self.line(breaker, self.uniform(0.8, 2.6), WHITE)
        for _ in range(self.choice((0, 4, 12, 20))):
            place = self.choice(shore) - self.uniform(12, 40) * 1j
            self.dome(place, 1.4, self.choice(PAINTS), 1.6)

    # Town, harbour and airport, sports

    def buildings(self):
        """Blocks with flat roofs and machines on them, streets and trees."""
        self.fill(self.choice((self.asphalt, self.concrete, self.grass, self.asphalt)))
        for turn in (1, 1j, -1, -1j):
            if self.chance(0.4):
                self.road(40, 2, turn)
        self.trees(0, 4, 9)
        columns, rows = self.choice(((1, 1), (2, 1), (2, 2), (3, 1), (3, 2)))
        for place in places(columns, rows, 76 / columns, 76 / rows):
            length = 76 / columns * self.uniform(0.6, 0.88)
            width = 76 / rows * self.uniform(0.5, 0.85)
            roof = self.one_of(*FLAT_ROOFS)
            self.box(place, length, width, lighter(roof, 26), 1, self.uniform(5, 11))
            self.box(place, length - 1.6, width - 1.6, roof)
            for _ in range(self.random.randrange(2, 8)):
                aside = complex(self.uniform(-0.4, 0.4) * length, self.uniform(-0.4, 0.4) * width)
                self.box(place + aside, self.uniform(2, 5), 3, self.choice(PAINTS), 1, 1.8)

    def parkinglot(self):
        """Rows of stalls, most of them taken."""
        self.fill(self.asphalt)
        paint = self.choice((WHITE, YELLOW, WHITE))
        busy = self.uniform(0.6, 0.97)
        for kerb, side in self.lots(self.uniform(6, 8), self.asphalt, 2.8, 5.2):
            self.line([kerb, kerb + side * 5.2], 0.4, paint)
            if self.chance(busy):
                self.car(kerb + 1.4 + side * self.uniform(2.3, 2.9), side, self.uniform(4, 5))

    def storagetanks(self):
        """Round tanks in rows, small or large, with lanes between them."""
        self.fill(self.choice((self.concrete, self.soil, self.grass, self.asphalt)))
        for x in range(-60, 61, 30):
            self.strip(x, 1.5, self.tint(self.soil, 20), 1j)
        metal = self.choice(((226, 226, 220), (196, 198, 198), (212, 200, 176), (176, 150, 126)))
        fields = ((1, 1, 20), (2, 1, 15), (2, 2, 13), (2, 2, 10), (3, 2, 9), (3, 3, 8))
        columns, rows, radius = self.choice(fields)
        pitch = 2 * radius * self.uniform(1.2, 1.5)
        for place in places(columns, rows, pitch, pitch):
            self.dome(place, radius, darker(metal, 0.8), 9)
            self.dome(place, 0.93 * radius, self.tint(metal), 0)

    def harbor(self):
        """Water, piers that begin at a quay, boats at the piers."""
        self.fill(self.water)
        planks = self.choice((self.concrete, (150, 126, 98), (204, 200, 190)))
        length = self.uniform(8, 15)
        berth = length * self.uniform(0.42, 0.6)
        hull = [0.5, 0.15 + 0.17j, -0.5 + 0.15j]
        for pier, side in self.lots(2.2, planks, berth, length + self.uniform(2, 5)):
            self.line([pier, pier + side * length * 0.8], 0.8, planks)
            if self.chance(0.85):
                boat = pier + berth / 2 + side * (length / 2 + 0.8)
                bow = length * side * self.choice((-1, 1)) * self.uniform(0.75, 1)
                self.shape(hull, self.tint(WHITE, 14), boat, bow, 1.2)
                self.shape(hull, self.choice(PAINTS), boat - 0.08 * bow, 0.55 * bow)
        quay = self.choice((self.concrete, self.asphalt))
        self.strip(self.uniform(64, 100), 80, quay, 1j)

    def airplane(self):
        """An apron with a yellow line, one to three aeroplanes, a few vehicles."""
        self.fill(self.choice((self.concrete, self.asphalt)))
        self.line(self.winding(6, 40), 0.8, YELLOW)
        for _ in range(self.choice((1, 3, 5))):
            self.car(self.anywhere(), 1j, self.uniform(3, 8))
        body = self.one_of(WHITE, WHITE, (200, 204, 210), (176, 180, 188))
        tip = complex(self.uniform(-0.1, 0), self.uniform(0.42, 0.52))
        wings = [0.12, tip, tip - 0.07, -0.08 + 0.04j, -0.08]
        tail = [-0.36, -0.45 + 0.17j, -0.49 + 0.17j, -0.46]
        hull = [0.5, 0.47 + 0.025j, 0.4 + 0.05j, -0.3 + 0.05j, -0.5 + 0.012j]
        parts = ((wings, darker(body, 0.9)), (tail, self.choice(PAINTS)), (hull, body))
        count, length = self.choice(((1, 42), (1, 34), (2, 25), (3, 20)))
        for place in places(count, 1, 30, 0):
            nose = polar(length * self.uniform(0.85, 1), self.uniform(1.2, 1.9))
            centre = place + self.uniform(-6, 6) * 1j
            for height in (2.6, 0):  # all shadows lie below all parts
                for part, colour in parts:
                    self.shape(part, colour, centre, nose, height)

    def runway(self):
        """A broad strip with edges and dashes, some with its end."""
        self.fill(self.choice((self.grass, self.soil, self.tint(self.grass, 20))))
        width = self.uniform(26, 44)
        self.strip(0, width + self.choice((0, 4, 12)), self.tint(self.asphalt, 16))
        self.strip(0, width, self.choice((self.asphalt, self.concrete)))
        for side in (-0.45, 0.45):
            self.strip(side * width, 0.9, WHITE)
        end = -2 * FAR
        if self.chance(0.6):  # its end: a white line, and bars behind it
            end = self.uniform(-38, -8)
            self.strip(-end, 1.2, WHITE, 1j, -width / 2, width / 2)
            for y in np.linspace(-0.38, 0.38, self.choice((6, 8, 10))):
                self.strip(y * width, 0.04 * width, WHITE, 1, end + 3, end + 21)
        self.strip(0, 1.1, WHITE, begin=end + 30, dash=self.uniform(14, 22), gap=12)

    def baseballdiamond(self):
        """A lawn and a field of dirt that open like fans from home plate, and two dugouts."""
        self.fill(self.choice((self.grass, self.soil, self.tint(self.grass, 24))))
        dirt = self.one_of((176, 134, 92), (196, 160, 118), (156, 112, 80), (188, 170, 138))
        lawn = self.one_of(self.grass, (92, 140, 62))
        base = self.uniform(22, 29)
        home_plate = -0.72 * base
        corner = polar(1, math.pi / 4)
        fan = [0, *(polar(1, angle) for angle in np.linspace(math.pi / 4, 0, 9))]
        self.shape(fan, lawn, home_plate, base * self.uniform(3, 3.6))
        self.shape(fan, dirt, home_plate, base * 1.72)
        if self.chance(0.8):
            self.box(home_plate + 0.71 * base, 0.86 * base, 0.86 * base, lawn, corner)
        self.disc(home_plate + 0.66 * base, 2.8, dirt)
        self.disc(home_plate, 4.2, dirt)
        for line in (corner, corner.conjugate()):
            self.line([home_plate, home_plate + 3.2 * base * line], 0.5, WHITE)
            dugout = home_plate + 0.62 * base * line**1.53
            self.box(dugout, 9, 2.4, self.choice(FLAT_ROOFS), line, 2.5)

    def tenniscourt(self):
        """One to four courts, and trees around them."""
        self.fill(self.choice((self.grass, self.concrete, self.asphalt, self.soil)))
        self.trees(3, 8, 16)
        columns, rows = self.choice(((1, 1), (2, 1), (2, 1), (3, 1), (2, 2)))
        court = self.one_of(*COURTS)
        self.box(0, columns * 17 + 3, rows * 35 + 3, self.one_of(*COURTS))
        for middle in places(columns, rows, 17, 35):
            for width, length in ((11, 23.8), (8.2, 23.8), (8.2, 12.8)):
                self.box(middle, width + 0.6, length + 0.6, WHITE)
                self.box(middle, width - 0.6, length - 0.6, court)
            for turn in (1, 1j):
                self.box(middle, 12.8, 0.6, WHITE, turn)

    def golfcourse(self):
        """A mown fairway, a green with bunkers, trees, sometimes a pond and a path."""
        lush = self.one_of(self.grass, (104, 146, 70), (124, 158, 80))
        self.fill(self.choice((self.grass, self.leaf, lighter(lush, -14))))
        course = self.winding(self.uniform(7, 13), self.uniform(18, 30))
        width = self.uniform(18, 26)
        for k, point in enumerate(course):
            self.disc(point, width / 2, lighter(lush, (6, 18)[k // 2 % 2]))
        hole = self.choice(course[10:20])
        if self.chance(0.4):
            self.blob(hole + self.choice((-26j, 26j)), self.uniform(8, 12), self.water)
        if self.chance(0.6):
            self.line(course + 1j * (width / 2 + 5), 2, self.concrete)
        self.blob(hole, 11, lighter(lush, 26))
        self.blob(hole, 8, lighter(lush, 44))
        for _ in range(self.random.randrange(3, 7)):
            bunker = hole + polar(self.uniform(13, 28), self.uniform(0, 6.3))
            for _ in range(3):
                aside = complex(self.uniform(-3, 3), self.uniform(-3, 3))
                self.blob(bunker + aside, self.uniform(2.6, 4.4), (226, 208, 168))
        for _ in range(self.choice((10, 24, 40))):
            aside = self.choice((-1j, 1j)) * (width / 2 + self.uniform(8, 30))
            self.tree(self.choice(course) + aside)


CLASSES = tuple(name for name in vars(Land) if not name.startswith("_"))


if __name__ == "__main__":
    command_line(draw, CLASSES, PER_CLASS)
