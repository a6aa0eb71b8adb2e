"""Draws dogs of ten breeds: a stand-in for photographs of dogs.

It is for where these cannot be downloaded. The pictures are not photographs and show no dog
that ever lived.

    python data/dogs/draw.py FOLDER

writes FOLDER/<breed>/<breed><number>.png, 150 pictures of each.

A picture is composed from the back to the front, and the file follows it:

1. the dogs that there are: anatomies and coats (`BREEDS`);
2. the place: the sky, or a wall, and the ground before it;
3. the dog: its coat and its limbs; the whole of it from the side, or its face from the front;
4. the light: the picture is photographed by a passer-by.

The coats of different breeds share their colours, and pose, place, light and distance vary, so
that shape and coat together make the breed. A part of a dog is a limb: a list of (point,
radius), discs joined to one another. Points are complex numbers with y downwards; the picture
is 100 wide, and a dog faces to the right until it is mirrored.

The promises are those of `data/drawing.py`, which has what this program shares with other ones.
"""

import math
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

sys.path.insert(0, str(Path(__file__).parents[1]))  # data/, where drawing.py lies

from drawing import Camera, Sheet, command_line, mixed, photographed, polar

SEED = 2011
PER_CLASS = 150

BLACK = (44, 41, 44)
WHITE = (240, 236, 228)
GREY = (142, 142, 148)
SLATE = (104, 112, 124)
CREAM = (236, 218, 182)
FAWN = (212, 178, 132)
APRICOT = (222, 170, 118)
GOLD = (214, 166, 94)
TAN = (192, 136, 82)
RED = (162, 88, 46)
SABLE = (126, 100, 72)
CHOCOLATE = (94, 60, 44)
BROWN = (66, 42, 28)
BLUE = (120, 178, 214)
PINK = (226, 128, 132)
NOSE = (30, 26, 28)

PASSER_BY = Camera(
    blur=0.3,
    patches=5,
    unevenness=0.035,
    exposure=(0.74, 1.14),
    haze=22,
    contrast=(0.8, 1.05),
    noise=(1, 3.5),
)


def draw(label: str, number: int, size: int = 64) -> np.ndarray:
    """Picture `number` of the breed `label`: RGB bytes of the shape (size, size, 3).

    Raises ValueError for a breed that is not in CLASSES.
    """
    if label not in CLASSES:
        raise ValueError(f"No breed {label!r} is drawn. There is: {', '.join(CLASSES)}.")
    breed = BREEDS[label]
    picture = Picture(f"{SEED} {label} {number}", size)
    colours = picture.choice(breed.coats)
    coat = {part: picture.tint(colour, 12) for part, colour in colours.items()}

    place = picture.choice(PLACES)
    place(picture)
    pose = picture.choice(POSES)
    mirrored = picture.chance(0.5)
    if pose is portrait:
        come_near(picture, breed, mirrored)
    else:
        step_back(picture, breed, mirrored)
    pose(picture, breed, coat)
    return photographed(picture, PASSER_BY)


def come_near(picture, breed, mirrored):
    """So near that the face fills the picture."""
    nearer = picture.uniform(54, 69) / ((2.3 + 0.6 * breed.ear) * breed.head)
    middle = complex(50 + picture.uniform(-7, 7), picture.uniform(42, 55))
    picture.place(nearer, middle, mirrored)


def step_back(picture, breed, mirrored):
    """So far that the whole dog is seen."""
    length = breed.length + breed.chest + breed.neck + breed.head * (1 + breed.muzzle)
    height = breed.leg + 2 * breed.chest + breed.neck + 2.4 * breed.head
    nearer = picture.uniform(0.87, 1.12) * 75 / max(length, height)
    x = 50 + picture.uniform(-6, 6)
    picture.place(nearer, complex(x, picture.uniform(85, 95) - 38 * nearer), mirrored)


# The dogs that there are


@dataclass
class Breed:
    """An anatomy in hundredths of the picture; muzzle and ears are in radii of the head."""

    leg: float
    length: float
    chest: float
    waist: float
    neck: float
    head: float
    muzzle: float
    deep: float
    ears: str  # pricked, hanging, folded forward, rose (folded back)
    ear: float
    tail: str  # rod, sabre, plume, bushy, sickle, curl, thin, pom, none
    coats: tuple  # a dict each: part of the coat -> colour
    fur: str = "short"  # short, long, curly


WHITE_BELOW = {"under": WHITE, "socks": WHITE, "muzzle": WHITE}
TAN_POINTS = {"socks": TAN, "muzzle": TAN, "brows": TAN}

BREEDS = {
    "beagle": Breed(
        leg=17, length=31, chest=9.5, waist=8.2, neck=7, head=7.4, muzzle=0.85, deep=0.5,
        ears="hanging", ear=1.55, tail="rod",
        coats=(
            dict(base=TAN, saddle=BLACK, **WHITE_BELOW, blaze=WHITE, ear=RED, tip=WHITE),
            dict(base=RED, saddle=BLACK, **WHITE_BELOW, blaze=WHITE, ear=RED, tip=WHITE),
            dict(base=FAWN, **WHITE_BELOW, blaze=WHITE, ear=APRICOT, tip=WHITE),
        ),
    ),
    "corgi": Breed(
        leg=7.5, length=37, chest=10, waist=9.4, neck=7, head=7.8, muzzle=0.85, deep=0.38,
        ears="pricked", ear=1.5, tail="none", fur="long",
        coats=(
            dict(base=RED, **WHITE_BELOW, blaze=WHITE),
            dict(base=GOLD, **WHITE_BELOW, blaze=WHITE),
            dict(base=TAN, saddle=BLACK, **WHITE_BELOW, blaze=WHITE),
        ),
    ),
    "dachshund": Breed(
        leg=6, length=44, chest=7.8, waist=6.8, neck=8, head=6.2, muzzle=1.35, deep=0.36,
        ears="hanging", ear=1.5, tail="rod",
        coats=(
            dict(base=RED, ear=CHOCOLATE),
            dict(base=BLACK, **TAN_POINTS),
            dict(base=CHOCOLATE, **TAN_POINTS),
        ),
    ),
    "dalmatian": Breed(
        leg=24, length=31, chest=9.4, waist=7.4, neck=10, head=6.8, muzzle=1.05, deep=0.47,
        ears="hanging", ear=1.1, tail="sabre",
        coats=(
            dict(base=WHITE, spots=BLACK, ear=BLACK),
            dict(base=WHITE, spots=CHOCOLATE, ear=CHOCOLATE),
            dict(base=CREAM, spots=BLACK, ear=WHITE),
        ),
    ),
    "german_shepherd": Breed(
        leg=20, length=35, chest=10.4, waist=8, neck=10, head=7, muzzle=1.2, deep=0.42,
        ears="pricked", ear=1.35, tail="bushy",
        coats=(
            dict(base=TAN, saddle=BLACK, muzzle=BLACK, ear=BLACK),
            dict(base=FAWN, saddle=BLACK, muzzle=BLACK, ear=SABLE),
            dict(base=BLACK),
            dict(base=SABLE, saddle=BLACK, muzzle=BLACK, socks=FAWN),
        ),
    ),
    "golden_retriever": Breed(
        leg=18, length=33, chest=10.6, waist=9.6, neck=9, head=7.7, muzzle=0.95, deep=0.52,
        ears="hanging", ear=1.0, tail="plume", fur="long",
        coats=(
            dict(base=GOLD, ear=TAN),
            dict(base=CREAM, ear=GOLD),
            dict(base=APRICOT, under=GOLD, ear=TAN),
        ),
    ),
    "greyhound": Breed(
        leg=29, length=33, chest=9, waist=4.9, neck=12, head=5.2, muzzle=1.75, deep=0.32,
        ears="rose", ear=0.8, tail="thin",
        coats=(
            dict(base=FAWN, under=WHITE),
            dict(base=BLACK, under=WHITE),
            dict(base=TAN, brindle=BROWN),
            dict(base=SLATE, under=WHITE, socks=WHITE),
        ),
    ),
    "poodle": Breed(
        leg=25, length=25, chest=8.6, waist=5.8, neck=10, head=6.3, muzzle=1.4, deep=0.33,
        ears="hanging", ear=1.35, tail="pom", fur="curly",
        coats=(
            dict(base=WHITE),
            dict(base=BLACK),
            dict(base=APRICOT),
            dict(base=GREY),
        ),
    ),
    "pug": Breed(
        leg=13, length=25, chest=10.6, waist=9.6, neck=4, head=8.8, muzzle=0.05, deep=0.58,
        ears="folded", ear=0.75, tail="curl",
        coats=(
            dict(base=FAWN, muzzle=BLACK, ear=BLACK),
            dict(base=BLACK),
            dict(base=GREY, muzzle=BLACK, ear=BLACK),
            dict(base=CREAM, muzzle=BLACK, ear=BROWN),
        ),
    ),
    "siberian_husky": Breed(
        leg=20, length=31, chest=10.8, waist=9.4, neck=8, head=7.7, muzzle=0.9, deep=0.42,
        ears="pricked", ear=1.0, tail="sickle", fur="long",
        coats=(
            dict(base=GREY, **WHITE_BELOW, mask=WHITE, eye=BLUE),
            dict(base=BLACK, **WHITE_BELOW, mask=WHITE, eye=BLUE),
            dict(base=RED, **WHITE_BELOW, mask=WHITE, eye=BLUE),
            dict(base=SABLE, **WHITE_BELOW, mask=WHITE),
        ),
    ),
}
CLASSES = tuple(BREEDS)


# Paper and brushes


class Picture(Sheet):
    """A sheet 100 wide. `place` says where a figure of the size 100 goes."""

    def __init__(self, name, size):
        super().__init__(name, size)
        self.floor = None  # the colour of the ground, on which shadows fall
        self.place()

    def place(self, scale=1.0, middle=50 + 50j, mirrored=False):
        """From now on the point 50 + 50j of what is drawn lies at `middle`."""
        self.scale = scale
        self.shift = middle - scale * (50 + 50j)
        self.mirrored = mirrored
        self.unit = scale * self.canvas / 100

    def at(self, point):
        place = (point * self.scale + self.shift) * self.canvas / 100
        x = self.canvas - place.real if self.mirrored else place.real
        return x, place.imag

    def box(self, corner, opposite, colour):
        """A rectangle between two corners."""
        above = complex(opposite.real, corner.imag)
        below = complex(corner.real, opposite.imag)
        self.polygon([corner, above, opposite, below], colour)

    def limb(self, limb, colour, pen=None, more=0.0):
        """Discs along the points, joined; `more` thickens."""
        for (start, first), (end, second) in zip(limb, limb[1:]):
            side = sideways(start, end)
            begin = side * (first + more)
            finish = side * (second + more)
            self.polygon([start + begin, end + finish, end - finish, start - begin], colour, pen)
        for point, radius in limb:
            self.disc(point, radius + more, colour, pen)

    def part(self, limbs, coat, outline=0.55, shaggy=0.0):
        """Limbs that belong together, in the colour or the picture `coat`, in one dark outline."""
        if shaggy:  # the edge is rough
            limbs = limbs + [[tuft] for limb in limbs for tuft in self.tufts(limb, shaggy)]
        first = coat if isinstance(coat, tuple) else coat.getpixel((0, 0))
        dark = tuple(channel * 11 // 20 for channel in first)
        for limb in limbs:
            self.limb(limb, dark, more=outline / self.scale)
        mask = Image.new("L", self.image.size)
        pen = ImageDraw.Draw(mask)
        for limb in limbs:
            self.limb(limb, 255, pen)
        self.image.paste(coat, (0, 0), mask)

    def tufts(self, limb, size):
        """Small discs on the edge of a limb."""
        for (start, first), (end, second) in zip(limb, limb[1:]):
            side = sideways(start, end)
            for _ in range(int(abs(end - start) / size) + 2):
                along = self.random.random()
                edge = side * (first + (second - first) * along) * self.choice((-1, 1))
                yield start + (end - start) * along + edge, size * self.uniform(0.7, 1.3)
        point, radius = limb[-1]
        for _ in range(int(radius * 4 / size)):
            edge = polar(radius, self.uniform(0, 6.3))
            yield point + edge, size * self.uniform(0.6, 1.1)


def sideways(start, end):
    """The direction to the right of the way from start to end, of the length 1."""
    return 1j * (end - start) / (abs(end - start) or 1)


# The sky and the ground


def sky(picture, horizon, above, below):
    """Eight bands down to the horizon, from the colour `above` to the colour `below`."""
    for k in range(8):
        top = complex(-5, horizon * k / 8)
        bottom = complex(105, horizon * (k + 1) / 8 + 1)
        picture.box(top, bottom, mixed(above, below, k / 7))


def floor(picture, horizon, colour):
    """The ground from the horizon on, and its colour for the shadows that fall on it."""
    picture.floor = colour
    for k in range(5):
        top = complex(-5, horizon + (101 - horizon) * k / 5)
        shade = WHITE if k % 2 else BLACK
        picture.box(top, complex(105, 101), mixed(colour, shade, 0.02 * k))


# Places outdoors


def lawn(picture):
    """Trees, a hedge with trees, or a fence; grass with blades and sometimes flowers."""
    horizon = picture.uniform(42, 66)
    greens = ((104, 150, 66), (130, 160, 80), (84, 128, 62), (164, 164, 92))
    grass = picture.tint(picture.choice(greens), 12)
    above = picture.tint((120, 172, 224), 16)
    sky(picture, horizon, above, picture.tint((214, 230, 238), 10))
    leaf = mixed(grass, (30, 70, 40), picture.uniform(0.3, 0.7))
    background = picture.choice(("trees", "hedge", "fence"))
    if background != "fence":
        for _ in range(picture.choice((3, 5, 9))):
            x = picture.uniform(0, 100)
            radius = picture.uniform(7, 16)
            trunk(picture, x, horizon, radius, 1.2, (92, 68, 50))
            picture.disc(complex(x, horizon - radius * 1.3), radius, picture.tint(leaf, 14))
    if background == "hedge":
        for x in range(-4, 110, 6):
            bush = complex(x, horizon - picture.uniform(3, 7))
            picture.oval(bush, 7, 9, picture.tint(leaf, 8))
    if background == "fence":
        fence(picture, horizon)

    floor(picture, horizon, grass)
    for _ in range(60):
        foot = complex(picture.uniform(0, 100), picture.uniform(horizon + 1, 100))
        top = foot + complex(picture.uniform(-1, 1), -2.5)
        blade = mixed(grass, picture.choice((BLACK, WHITE, (180, 200, 80))), 0.22)
        picture.line([foot, top], 0.6, picture.tint(blade, 6))
    for _ in range(picture.choice((0, 0, 12))):
        flower = complex(picture.uniform(0, 100), picture.uniform(horizon + 6, 100))
        picture.disc(flower, 1.1, picture.choice((WHITE, (240, 210, 80), (220, 110, 150))))


def trunk(picture, x, horizon, height, half, colour):
    picture.box(complex(x - half, horizon - height), complex(x + half, horizon + 1), colour)


def fence(picture, horizon):
    """Two rails, and pales with pointed tops before them."""
    wood = picture.tint(picture.choice((WHITE, (170, 130, 90), (140, 110, 90))), 10)
    for y in (15, 6):
        rail = complex(-5, horizon - y)
        picture.box(rail, complex(105, horizon - y + 2.5), mixed(wood, BLACK, 0.15))
    for x in range(-3, 105, 8):
        foot = complex(x, horizon + 1)
        shoulder = complex(x, horizon - 18)
        tip = complex(x + 2.4, horizon - 21)
        picture.polygon([foot, shoulder, tip, shoulder + 4.8, foot + 4.8], wood)


def beach(picture):
    """The sea with waves, and sand."""
    horizon = picture.uniform(30, 46)
    above = picture.tint((110, 170, 220), 20)
    sky(picture, horizon, above, picture.tint((224, 228, 226), 12))
    sea = picture.tint(picture.choice(((52, 120, 156), (70, 140, 150), (84, 116, 136))), 12)
    picture.box(complex(-5, horizon), 105 + 101j, sea)
    for _ in range(7):
        wave = complex(picture.uniform(-5, 90), picture.uniform(horizon + 2, horizon + 16))
        picture.line([wave, wave + picture.uniform(6, 22)], 0.7, mixed(sea, WHITE, 0.5))
    sand = picture.tint(picture.choice(((222, 200, 156), (206, 184, 146), (190, 172, 144))), 10)
    shore = horizon + 20
    floor(picture, shore, sand)
    surf = [complex(x, shore + 1.5 * math.sin(x / 9)) for x in range(-4, 110, 6)]
    picture.line(surf, 2.2, WHITE)
    for _ in range(30):
        pebble = complex(picture.uniform(0, 100), picture.uniform(horizon + 24, 100))
        picture.oval(pebble, 1.2, 0.5, mixed(sand, BLACK, picture.uniform(0.05, 0.2)))


def street(picture):
    """A wall of bricks, perhaps with a door, and a pavement."""
    horizon = picture.uniform(56, 70)
    bricks = ((160, 90, 72), (182, 170, 150), (128, 120, 116), (200, 176, 140))
    wall = picture.tint(picture.choice(bricks), 12)
    mortar = mixed(wall, WHITE, 0.3)
    picture.box(-5 - 5j, complex(105, horizon), mortar)
    for row in range(int(horizon / 7) + 1):
        for k in range(-1, 8):
            brick = complex(k * 14 + 7 * (row % 2) + 0.5, horizon - 7 * (row + 1) + 0.5)
            picture.box(brick, brick + 13 + 6j, picture.tint(wall, 8))
    if picture.chance(0.5):
        x = picture.choice((8, 72))
        paint = picture.choice(((60, 90, 120), (120, 50, 50), (60, 100, 80), (90, 70, 60)))
        picture.box(complex(x, horizon - 50), complex(x + 20, horizon), picture.tint(paint, 10))
    floor(picture, horizon, picture.tint((156, 154, 150), 16))
    joint = mixed(picture.floor, BLACK, 0.3)
    for k in range(-5, 6):
        picture.line([complex(50 + k * 14, horizon), complex(50 + k * 26, 101)], 0.5, joint)
    picture.line([complex(-5, horizon + 12), complex(105, horizon + 12)], 0.6, joint)


# Places indoors


def room(picture):
    """A wall, perhaps with stripes, a floor of boards, a skirting."""
    horizon = picture.uniform(60, 74)
    walls = (
        (206, 196, 176), (168, 188, 196), (196, 172, 168), (172, 188, 160),
        (222, 216, 204), (120, 132, 150), (214, 190, 120),
    )
    wall = picture.tint(picture.choice(walls), 12)
    picture.box(-5 - 5j, complex(105, horizon), wall)
    if picture.chance(0.4):
        for x in range(-4, 105, 9):
            picture.box(complex(x, -5), complex(x + 4, horizon), mixed(wall, WHITE, 0.14))
    boards(picture, horizon)
    picture.box(complex(-5, horizon - 2.6), complex(105, horizon + 0.4), mixed(wall, WHITE, 0.6))


def boards(picture, horizon):
    woods = ((170, 122, 80), (140, 98, 66), (196, 156, 112), (112, 84, 66))
    wood = picture.tint(picture.choice(woods), 10)
    floor(picture, horizon, wood)
    for k in range(-8, 9):
        gap = [complex(50 + k * 8, horizon), complex(50 + k * 17, 101)]
        picture.line(gap, 0.5, mixed(wood, BLACK, 0.3))


PLACES = (lawn, lawn, beach, room, street)


# The dog: its coat


def body_coat(picture, breed, coat, hip, shoulder, legs):
    """The coat of the trunk as a picture, of which the limbs show their part.

    It has a texture, and what the breed has of saddle, white below, socks, stripes and spots.
    """
    layer = picture.layer(coat["base"])
    pen = ImageDraw.Draw(layer)
    length = abs(shoulder - hip)
    spine = (shoulder - hip) / length
    up = -1j * spine
    texture(picture, pen, coat["base"], breed.fur, (hip + shoulder) / 2, 34)
    if "saddle" in coat:
        croup = hip - spine * breed.waist * 0.5
        back = [croup + spine * (length + breed.waist * 0.3) * k / 6 for k in range(7)]
        saddle = []
        for point in back:
            radius = breed.chest * picture.uniform(0.72, 0.95)
            saddle.append((point + up * breed.waist * 0.55, radius))
        picture.limb(saddle, coat["saddle"], pen)
    if "under" in coat:
        belly = hip + spine * length * 0.4 - up * breed.waist
        brisket = shoulder - up * breed.chest * 0.8
        breast = shoulder + spine * breed.chest * 1.05 + up * breed.chest * 0.2
        throat = shoulder + spine * breed.chest * 1.1 + up * breed.chest * 1.0
        under = [
            (belly, breed.waist * 0.45),
            (brisket, breed.chest * 0.6),
            (breast, breed.chest * 0.62),
            (throat, breed.chest * 0.5),
        ]
        picture.limb(under, coat["under"], pen)
    if "socks" in coat:
        for leg in legs:
            picture.limb([(point, radius * 1.5) for point, radius in leg[-3:]], coat["socks"], pen)
    if "brindle" in coat:
        stripe = mixed(coat["base"], coat["brindle"], 0.6)
        for k in range(18):
            middle = hip + spine * length * (k / 14 - 0.15)
            top = middle + up * breed.chest
            foot = middle + spine * picture.uniform(-2, 2) - up * breed.chest
            picture.line([top, foot], picture.uniform(0.5, 0.9), stripe, pen)
    if "spots" in coat:
        spots(picture, pen, coat["spots"], (hip + shoulder) / 2 + 4j, 40, 1.0)
    return layer


def spots(picture, pen, colour, centre, reach, size):
    for _ in range(70):
        aside = complex(picture.uniform(-reach, reach), picture.uniform(-reach, reach))
        wide = size * picture.uniform(0.8, 2)
        picture.oval(centre + aside, wide, size * picture.uniform(0.8, 1.8), colour, pen)


def texture(picture, pen, colour, fur, centre, reach):
    """Hair, within `reach` of the centre: strokes for a long coat, curls for a curly one."""
    count = {"short": 0, "long": 60, "curly": 90}[fur]
    unit = reach / 34
    for _ in range(count):
        point = centre + complex(picture.uniform(-reach, reach), picture.uniform(-reach, reach))
        if fur == "long":
            stroke = complex(picture.uniform(-2.5, -1), picture.uniform(1, 3.5)) * unit
            shade = mixed(colour, picture.choice((BLACK, WHITE)), picture.uniform(0.05, 0.2))
            picture.line([point, point + stroke], 0.7 * unit, shade, pen)
        else:
            picture.disc(point + (0.4 + 0.5j) * unit, 2 * unit, mixed(colour, BLACK, 0.24), pen)
            picture.disc(point, 1.9 * unit, mixed(colour, WHITE, picture.uniform(0.0, 0.14)), pen)


def ruffled(breed, long, curly):
    """How rough the edge of a part is: that of a short coat is smooth."""
    return {"short": 0, "long": long, "curly": curly}[breed.fur]


# The dog: tail and legs

TAILS = {  # points and radii, from the rump on
    "rod": ((0, 1.8), (-5 - 6j, 1.5), (-8 - 13j, 0.8)),
    "sabre": ((0, 1.7), (-7 + 3j, 1.4), (-14 + 1j, 1.1), (-18 - 3j, 0.7)),
    "plume": ((0, 2.0), (-7 - 1j, 3.0), (-13 + 2j, 3.4), (-17 + 7j, 1.6)),
    "bushy": ((0, 2.2), (-5 + 5j, 2.8), (-7 + 13j, 3.0), (-5 + 20j, 1.4)),
    "sickle": ((0, 2.6), (-4 - 7j, 3.2), (0 - 13j, 3.4), (7 - 14j, 3.0), (10 - 10j, 2.0)),
    "thin": ((0, 1.4), (-4 + 7j, 1.1), (-4 + 14j, 0.9), (-9 + 18j, 0.6)),
    "curl": (
        (0, 1.7), (-4 - 3j, 1.7), (-3 - 7j, 1.6), (1 - 7.5j, 1.5), (2 - 4j, 1.4), (-1 - 3.4j, 1.1),
    ),
    "pom": ((0, 1.3), (-2 - 5j, 1.2), (-3 - 11j, 4.8)),
    "none": ((0, 2.4), (-1.2 - 0.8j, 2.0)),
}


def tail(picture, breed, coat, rump, ground):
    """A tail that wags a little and does not reach into the ground."""
    wag = polar(1, picture.uniform(-0.25, 0.25))
    limb = []
    for point, radius in TAILS[breed.tail]:
        place = rump + point * wag
        limb.append((complex(place.real, min(place.imag, ground - radius)), radius))
    colour = mixed(coat.get("saddle", coat["base"]), BLACK, 0.06)
    hairy = breed.tail in ("plume", "bushy", "sickle")
    picture.part([limb], colour, shaggy=1.2 if hairy else 0)
    if "tip" in coat:
        (before, _), (last, _) = limb[-2:]
        begin = before * (1 - 0.6) + last * 0.6
        picture.part([limb[-1:], [(begin, 1.2), limb[-1]]], coat["tip"], outline=0)
    if breed.tail == "pom":
        picture.part([limb[-1:]], colour, shaggy=1.3)


def bone_width(breed):
    return 1.4 + breed.waist * 0.13


def front_leg(breed, shoulder, ground, forward):
    """Shoulder, elbow, wrist, heel, toes."""
    w = bone_width(breed)
    x = shoulder.real + breed.chest * 0.2
    return [
        (complex(x - 1, shoulder.imag + breed.chest * 0.25), 2.2 * w),
        (complex(x + forward * 0.2, ground - max(breed.leg, 6) * 0.8), 1.35 * w),
        (complex(x + forward * 0.7, ground - breed.leg * 0.3 - w), 0.95 * w),
        (complex(x + forward, ground - w), 0.95 * w),
        (complex(x + forward + 1.7 * w, ground - w * 0.8), 0.85 * w),
    ]


def hind_leg(breed, hip, ground, forward):
    """Hip, knee, hock, heel, toes."""
    w = bone_width(breed)
    x = hip.real
    return [
        (hip + 1j, breed.waist * 0.92),
        (complex(x + 2.5, ground - max(breed.leg, 6) * 0.85), 1.9 * w),
        (complex(x - 2.6 + forward * 0.6, ground - breed.leg * 0.42 - 0.5 * w), w),
        (complex(x - 2 + forward, ground - w), 0.95 * w),
        (complex(x + forward + 1.7 * w - 2, ground - w * 0.8), 0.85 * w),
    ]


# The dog: poses of the whole body


def standing(picture, breed, coat):
    ground = 88
    hip = complex(46 - breed.length / 2, ground - breed.leg - breed.chest * 0.95)
    shoulder = complex(46 + breed.length / 2, ground - breed.leg - breed.chest)
    if breed.tail == "bushy":  # a shepherd's back slopes
        hip += 2.5j
    stride = picture.uniform(-3.5, 3.5)
    near = [
        front_leg(breed, shoulder, ground, stride),
        hind_leg(breed, hip, ground, -stride),
    ]
    far = [
        front_leg(breed, shoulder, ground - 1.2, 2.5 - stride),
        hind_leg(breed, hip, ground - 1.2, 3 + stride),
    ]
    whole(picture, breed, coat, hip, shoulder, near, far, ground)


def sitting(picture, breed, coat):
    ground = 90
    w = bone_width(breed)
    trunk_length = breed.length * 0.84
    hip = complex(36, ground - breed.waist * 1.02)
    rise = (breed.leg * 0.95 + breed.chest * 1.25 - breed.waist) / trunk_length
    rise = min(0.87, max(0.45, rise))  # the sine of the back's slope
    shoulder = hip + trunk_length * complex(math.sqrt(1 - rise * rise), -rise)

    def front(shift):
        x = shoulder.real + breed.chest * 0.25 + shift
        return [
            (shoulder + 3j, 2.4 * w),
            (complex(x, (shoulder.imag + ground) / 2), 1.4 * w),
            (complex(x, ground - 3 * w), w),
            (complex(x, ground - w), w),
            (complex(x + 1.7 * w, ground - w), 0.9 * w),
        ]

    foot = max(hip.real + breed.waist * 0.8, hip.real + breed.length * 0.22)
    thigh = [
        (hip + 1.5 - 0.5j, breed.waist * 1.0),
        (complex(hip.real + breed.waist * 0.6, ground - 2.4 * w), 2 * w),
        (complex(foot, ground - w), w),
        (complex(foot + 3, ground - w), w),
    ]
    whole(picture, breed, coat, hip, shoulder, [front(0), thigh], [front(3)], ground)


SHADED = [round(value * 0.72) for value in range(256)] * 3  # the legs on the far side


def whole(picture, breed, coat, hip, shoulder, near, far, ground):
    """A dog from the side, given where hip, shoulder and legs are.

    Its shadow comes first, then tail and far legs, trunk and neck, the near legs, and at last the
    head.
    """
    shadow(picture, hip.real - breed.waist, shoulder.real + breed.chest + 4, ground)
    layer = body_coat(picture, breed, coat, hip, shoulder, near + far)
    spine = (shoulder - hip) / abs(shoulder - hip)
    high = 0.5 if breed.tail != "none" else 0.2
    rump = hip - spine * breed.waist * 0.7 - 1j * spine * breed.waist * high
    tail(picture, breed, coat, rump, ground)
    picture.part(far, layer.point(SHADED))

    angle = picture.uniform(0.7, 1.1)
    if breed.muzzle < 0.5:
        angle -= 0.15
    head = shoulder + polar(breed.chest * 0.55 + breed.neck + breed.head * 0.5, -angle)
    loin = (hip + shoulder) / 2 - 1j * spine * (breed.chest - breed.waist) * 0.7
    trunk = [
        (hip, breed.waist),
        (loin, breed.waist * 0.75 + breed.chest * 0.25),
        (shoulder - spine * breed.chest * 0.3, breed.chest),
        (shoulder + spine, breed.chest * 0.96),
    ]
    neck = [
        (shoulder - 0.15j * breed.chest, breed.chest * 0.78),
        (head - 0.3 * breed.head, breed.head * 0.8),
    ]
    picture.part([trunk, neck], layer, shaggy=ruffled(breed, 1.3, 1.5))
    picture.part(near, layer, outline=0.35)
    thighs = [leg[:1] for leg in near]
    picture.part([trunk[1:], neck, *thighs], layer, outline=0)  # hides the lines where legs begin
    if breed.fur == "curly":
        mane_and_bracelets(picture, breed, coat, shoulder, near, head)
    if picture.chance(0.35):
        collar(picture, neck)
    head_from_the_side(picture, breed, coat, head, picture.uniform(-0.25, 0.3))


def shadow(picture, left, right, ground):
    middle = complex((left + right) / 2, ground - 0.5)
    picture.oval(middle, (right - left) / 2, 2.6, mixed(picture.floor, BLACK, 0.35))


def mane_and_bracelets(picture, breed, coat, shoulder, legs, head):
    """A poodle's."""
    layer = picture.layer(mixed(coat["base"], WHITE, 0.06))
    texture(picture, ImageDraw.Draw(layer), coat["base"], "curly", shoulder + 10j, 34)
    mane = [(shoulder - 2, breed.chest * 1.12), ((shoulder + head) / 2, breed.chest * 0.8)]
    picture.part([mane], layer, outline=0.4, shaggy=1.5)
    for leg in legs:
        heel, _ = leg[-2]
        picture.part([[(heel - 3j, 4.0)]], layer, outline=0.4, shaggy=1.3)


def collar(picture, neck):
    (below, first), (above, second) = neck
    middle = below * 0.42 + above * 0.58
    half = 1j * (above - below) / abs(above - below) * (first * 0.42 + second * 0.58)
    colours = ((190, 40, 44), (40, 80, 170), (40, 130, 90), (230, 180, 50), (140, 60, 140))
    picture.line([middle - half, middle + half], 1.8, picture.choice(colours))
    picture.disc(middle + half * 0.8 + 1.4j, 1.1, (230, 200, 90))


# The dog: what a head needs from either side


class Head:
    """Where a head is. Its parts are measured in its radius and from its middle.

    x goes ahead, or to the right where it is seen from the front, and y downwards.
    """

    def __init__(self, centre, radius, tilt):
        self.centre = centre
        self.radius = radius
        self.axis = polar(radius, tilt)

    def at(self, x, y):
        return self.centre + self.axis * complex(x, y)

    def limb(self, *discs):
        """A limb of discs, each given as x, y and radius."""
        return [(self.at(x, y), radius * self.radius) for x, y, radius in discs]


def head_coat(picture, breed, coat, head):
    """The coat of the head as a picture, and a pen for it: its colour, texture and spots."""
    layer = picture.layer(coat["base"])
    pen = ImageDraw.Draw(layer)
    texture(picture, pen, coat["base"], breed.fur, head.centre, 1.5 * head.radius)
    if "spots" in coat:
        spots(picture, pen, coat["spots"], head.at(0.2, 0), 1.8 * head.radius, head.radius * 0.1)
    return layer, pen


def ear_colour(coat):
    """An ear stands out from the head a little: darker, and lighter on a black dog."""
    if "ear" in coat:
        return coat["ear"]
    if sum(coat["base"]) > 200:
        return mixed(coat["base"], BLACK, 0.14)
    return mixed(coat["base"], WHITE, 0.09)


def seam(coat):
    """The colour of the mouth's line, which must show on a dark muzzle too."""
    around = coat.get("muzzle", coat["base"])
    if sum(around) > 250:
        return mixed(around, BLACK, 0.6)
    return mixed(around, WHITE, 0.16)


def eye(picture, coat, centre, radius):
    """A rim, the iris, the pupil, and a light in it."""
    rim = mixed(coat["base"], BLACK, 0.55) if sum(coat["base"]) > 250 else (120, 100, 84)
    picture.oval(centre, radius * 1.35, radius * 1.2, rim)
    picture.disc(centre, radius, coat.get("eye", BROWN))
    picture.disc(centre, radius * 0.66, NOSE)
    picture.disc(centre + radius * (0.35 - 0.35j), radius * 0.34, (255, 255, 255))


# The dog: a head from the side


def head_from_the_side(picture, breed, coat, centre, tilt):
    """The far ear, the tongue, skull and muzzle, mouth, nose, eye, and the near ear at last."""
    head = Head(centre, breed.head, tilt)
    deep = breed.deep
    layer, pen = head_coat(picture, breed, coat, head)
    markings_from_the_side(picture, breed, coat, head, pen)
    flap = head.limb(*ear_from_the_side(breed))
    ear = ear_colour(coat)
    if breed.ears == "pricked":
        behind = [(point + polar(breed.head * 0.6, tilt), radius) for point, radius in flap]
        picture.part([behind], mixed(ear, BLACK, 0.3))

    tip = 0.8 + breed.muzzle
    if picture.chance(0.35):
        tongue = head.limb((tip - 0.25, 0.4 + deep * 0.8, 0.2), (tip - 0.3, 0.75 + deep, 0.24))
        picture.limb(tongue, PINK)
    skull = head.limb((0, 0, 1), (0.12, 0.2, 0.88))
    muzzle = head.limb((0.45, 0.28, max(deep * 1.3, 0.58)), (tip, 0.4, deep))
    picture.part([skull, muzzle], layer, shaggy=0.9 if breed.fur == "long" else 0)
    cheek = head.limb((0.3, 0.1, 0.5), (0.9, 0.35, deep))
    jaw = head.limb((-0.22, 0.22, 0.72), (-0.5, 0.75, 0.56))
    picture.part([cheek, jaw], layer, outline=0)  # hides the lines where muzzle and neck begin
    mouth = [
        head.at(tip + deep * 0.55, 0.42 + deep * 0.5),
        head.at(tip * 0.8, 0.42 + deep * 0.72),
        head.at(0.55, 0.78),
    ]
    picture.line(mouth, 0.11 * breed.head, seam(coat))
    nose = head.at(tip + deep * 0.72, 0.4 - deep * 0.5)
    picture.oval(nose, 0.25 * breed.head, 0.21 * breed.head, NOSE)
    flat_faced = breed.muzzle < 0.5
    eye(picture, coat, head.at(0.5, -0.14), (0.2 if flat_faced else 0.16) * breed.head)

    if breed.fur == "curly":
        topknot = head.limb((-0.15, -0.85, 0.95), (-0.1, -0.5, 0.7))
        picture.part([topknot], layer, outline=0.4, shaggy=0.24 * breed.head)
    picture.part([flap], ear, shaggy=ruffled(breed, 0, 0.25) * breed.head)
    if breed.ears == "pricked":
        inside = [(point + 0.08 * breed.head, radius * 0.45) for point, radius in flap]
        picture.limb(inside, mixed(ear, PINK, 0.5))


def ear_from_the_side(breed):
    """Discs from the root to the tip."""
    long = breed.ear
    return {
        "pricked": ((-0.3, -0.55, 0.48), (-0.5, -0.6 - long * 0.75, 0.1)),
        "hanging": ((-0.4, -0.5, 0.28), (-0.55, 0.1, 0.46), (-0.5, -0.45 + long, 0.36)),
        "folded": ((-0.35, -0.66, 0.32), (0.12, -0.62 + long * 0.6, 0.12)),
        "rose": ((-0.45, -0.6, 0.3), (-0.5 - long, -0.3, 0.1)),
    }[breed.ears]


def markings_from_the_side(picture, breed, coat, head, pen):
    """Mask, muzzle, blaze and brows."""
    r = breed.head
    if "mask" in coat:
        cheek = head.limb((0.4, 0.75, 0.62), (0.5, 0.2, 0.36))
        picture.limb(cheek, coat["mask"], pen)
        picture.oval(head.at(0.62, -0.5), 0.22 * r, 0.16 * r, coat["mask"], pen)
    if "muzzle" in coat:
        root = (0.85, 0.4, breed.deep * 1.3)
        tip = (1.2 + breed.muzzle, 0.4, breed.deep * 1.6)
        picture.limb(head.limb(root, tip), coat["muzzle"], pen)
    if "blaze" in coat:
        picture.limb(head.limb((0.6, -0.85, 0.13), (1.1, 0.1, 0.25)), coat["blaze"], pen)
    if "brows" in coat:
        picture.oval(head.at(0.52, -0.42), 0.15 * r, 0.12 * r, coat["brows"], pen)


# The dog: a head from the front


def portrait(picture, breed, coat):
    """The face from the front, often tilted.

    The chest comes first, then ears that stand behind the skull, the skull, ears that hang before
    it, eyes and snout.
    """
    r = breed.head
    head = Head(50 + 46j, r, picture.uniform(-0.22, 0.22))
    narrow = 1.16 - 0.25 * breed.muzzle  # a long muzzle goes with a narrow skull
    layer, pen = head_coat(picture, breed, coat, head)
    markings_from_the_front(picture, breed, coat, head, pen)
    chest(picture, breed, coat, narrow)
    ear = ear_colour(coat)
    upright = breed.ears in ("pricked", "rose")
    if upright:
        for side in (-1, 1):
            flap = head.limb(*ear_from_the_front(breed, side * narrow))
            picture.part([flap], ear)
            inside = [(point + 0.06j * r, radius * 0.5) for point, radius in flap]
            picture.limb(inside, mixed(ear, PINK, 0.5))

    cheek = 0.55 if breed.fur == "long" else 0.42
    skull = head.limb(
        (-0.28 * narrow, -0.1, 0.85 * narrow),
        (0.28 * narrow, -0.1, 0.85 * narrow),
    )
    cheeks = head.limb(
        (-cheek * narrow, 0.3, 0.62 * narrow),
        (cheek * narrow, 0.3, 0.62 * narrow),
    )
    muzzle = head.limb(
        (0, 0.4, 0.3 + breed.deep * 0.6),
        (0, 0.6 + 0.28 * breed.muzzle, 0.26 + breed.deep * 0.5),
    )
    picture.part([skull, cheeks, muzzle], layer, shaggy=1.0 if breed.fur == "long" else 0)
    if breed.fur == "curly":
        topknot = head.limb((0, -0.95, 0.62), (0, -0.6, 0.6))
        picture.part([topknot], layer, outline=0.4, shaggy=0.26 * r)
    if not upright:
        for side in (-1, 1):
            flap = head.limb(*ear_from_the_front(breed, side * narrow))
            picture.part([flap], ear, shaggy=ruffled(breed, 0, 0.25 * r))

    flat_faced = breed.muzzle < 0.5
    for side in (-1, 1):
        centre = head.at(side * 0.43 * narrow, -0.06)
        eye(picture, coat, centre, (0.21 if flat_faced else 0.16) * r)
    snout(picture, breed, coat, head)


def ear_from_the_front(breed, side):
    """Discs from the root to the tip; `side` is less than 0 on the left."""
    long = breed.ear
    discs = {
        "pricked": ((0.55, -0.5, 0.46), (0.8, -0.55 - long * 0.75, 0.1)),
        "hanging": ((0.82, -0.5, 0.26), (1.12, 0.1, 0.36), (1.06, -0.5 + long, 0.32)),
        "folded": ((0.66, -0.76, 0.3), (1.02, -0.76 + long * 0.65, 0.13)),
        "rose": ((0.6, -0.55, 0.28), (1.25, -0.5, 0.1)),
    }[breed.ears]
    return [(side * x, y, radius) for x, y, radius in discs]


def markings_from_the_front(picture, breed, coat, head, pen):
    """Mask, muzzle, blaze and brows."""
    r = breed.head
    if "mask" in coat:
        for side in (-1, 1):
            cheek = head.limb((side * 0.4, 0.75, 0.62), (side * 0.5, 0.2, 0.36))
            picture.limb(cheek, coat["mask"], pen)
            picture.oval(head.at(side * 0.42, -0.5), 0.22 * r, 0.16 * r, coat["mask"], pen)
    if "muzzle" in coat:
        muzzle = head.limb((0, 0.35, 0.42 + breed.deep * 0.5), (0, 0.6 + 0.3 * breed.muzzle, 0.9))
        picture.limb(muzzle, coat["muzzle"], pen)
    if "blaze" in coat:
        picture.limb(head.limb((0, -1.1, 0.14), (0, 0.2, 0.26)), coat["blaze"], pen)
    if "brows" in coat:
        for side in (-1, 1):
            picture.oval(head.at(side * 0.4, -0.42), 0.15 * r, 0.12 * r, coat["brows"], pen)


def chest(picture, breed, coat, narrow):
    """Neck and chest below a face, often with a collar."""
    r = breed.head
    middle = 50 + 46j
    neck = [
        (middle + 0.6j * r, 0.75 * narrow * r),
        (middle + 2.2j * r, (1.05 + 0.1 * breed.waist / breed.leg) * narrow * r),
        (middle + 5j * r, 1.9 * r),
    ]
    layer = picture.layer(coat.get("saddle", coat["base"]))
    pen = ImageDraw.Draw(layer)
    texture(picture, pen, coat["base"], breed.fur, middle + 3j * r, 3 * r)
    if "spots" in coat:
        spots(picture, pen, coat["spots"], middle + 3j * r, 3 * r, r * 0.12)
    if "under" in coat or "socks" in coat:
        bib = [(middle + 1.3j * r, 0.5 * r), (middle + 4j * r, 0.9 * r)]
        picture.limb(bib, coat.get("under", coat.get("socks")), pen)
    picture.part([neck], layer, shaggy=ruffled(breed, 1.2, 1.8))
    if picture.chance(0.5):
        below = (middle + 2.4j * r, 1.3 * narrow * r)
        above = (middle + 1.0j * r, 0.9 * narrow * r)
        collar(picture, [below, above])


def snout(picture, breed, coat, head):
    """Tongue, mouth and nose from the front; a pug's wrinkles."""
    r = breed.head
    bottom = 0.42 + 0.3 * breed.muzzle
    wide = 0.14 + breed.deep * 0.35
    dark = seam(coat)
    if picture.chance(0.45):
        picture.limb(head.limb((0, bottom + 0.35, 0.16), (0, bottom + 0.62, 0.19)), PINK)
    lips = [
        head.at(-wide, bottom + 0.26),
        head.at(-wide * 0.5, bottom + 0.36),
        head.at(0, bottom + 0.24),
        head.at(wide * 0.5, bottom + 0.36),
        head.at(wide, bottom + 0.26),
    ]
    picture.line(lips, 0.08 * r, dark)
    picture.line([head.at(0, bottom), head.at(0, bottom + 0.26)], 0.08 * r, dark)
    nose = head.limb(
        (-0.1, bottom - 0.04, 0.13),
        (0.1, bottom - 0.04, 0.13),
        (0, bottom + 0.06, 0.11),
    )
    picture.limb(nose, NOSE)
    picture.oval(head.at(-0.06, bottom - 0.1), 0.07 * r, 0.035 * r, (120, 116, 120))
    flat_faced = breed.muzzle < 0.5
    for y in (-0.55, -0.4) if flat_faced else ():
        wrinkle = [head.at(-0.3, y), head.at(0, y - 0.09), head.at(0.3, y)]
        picture.line(wrinkle, 0.07 * r, mixed(coat["base"], BLACK, 0.35))


POSES = (standing, standing, sitting, portrait)


if __name__ == "__main__":
    command_line(draw, CLASSES, PER_CLASS)
