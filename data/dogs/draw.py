"""Draws dogs of ten breeds: a stand-in for photographs where these cannot be downloaded.

    python data/dogs/draw.py FOLDER

writes FOLDER/<breed>/<breed><number>.png, 150 pictures of each breed. They are not photographs
and show no dog that ever lived.

A picture is composed from the back to the front, and so is this file: the place, then the dog,
from the side or from the front, then its head. At last a passer-by photographs it. Coats of
different breeds share their colours, and pose, place, light and distance vary: shape and coat
together make the breed.

A part of a dog is a limb: a list of (point, radius), discs joined to one another. Points are
complex numbers with y downwards, the picture is 100 wide, and a dog faces to the right.
The promises are those of `data/drawing.py`, which has what this program shares with other ones.
"""

import math
import sys
from collections import namedtuple
from pathlib import Path
from types import SimpleNamespace

import numpy as np
from PIL import Image, ImageDraw, ImageOps

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
    breed = BREEDS[CLASSES.index(label)]
    picture = Picture(f"{SEED} {label} {number}", size)
    coats = [(base, rest) for name, bases, rest in COATS if name == label for base in bases]
    base, rest = picture.choice(coats)
    coat = {part: picture.tint(colour, 12) for part, colour in {"base": base, **rest}.items()}

    place = picture.choice(PLACES)
    place(picture)
    pose = picture.choice(POSES)
    if pose is portrait:  # the face fills the picture
        nearer = picture.uniform(54, 69) / ((2.3 + 0.6 * breed.ear) * breed.head)
        middle = complex(50 + picture.uniform(-7, 7), picture.uniform(42, 55))
    else:  # the whole dog is seen
        length = breed.body + breed.chest + breed.neck + breed.head * (1 + breed.snout)
        height = breed.leg + 2 * breed.chest + breed.neck + 2.4 * breed.head
        nearer = picture.uniform(0.87, 1.12) * 75 / max(length, height)
        ground = picture.uniform(85, 95)
        middle = complex(50 + picture.uniform(-6, 6), ground - (GROUND - 50) * nearer)
    picture.place(nearer, middle)
    pose(picture, breed, coat)
    if picture.chance(0.5):
        picture.image = ImageOps.mirror(picture.image)
    return photographed(picture, PASSER_BY)


# The dogs that there are

# Lengths are in hundredths of the picture. `head` is a radius: the length and the depth of the
# snout, and the length of the ears, are measured in it.
Breed = namedtuple("Breed", "name leg body chest waist neck head snout deep ears ear fur")
# fmt: off
BREEDS = (
    #                         leg  body chest waist neck head snout deep  ears      ear   fur
    Breed("beagle",           17,  31,  9.5,  8.2,  7,   7.4, 0.85, 0.5,  "drop",   1.55, "short"),
    Breed("corgi",            7.5, 37,  10,   9.4,  7,   7.8, 0.85, 0.38, "prick",  1.5,  "long"),
    Breed("dachshund",        6,   44,  7.8,  6.8,  8,   6.2, 1.35, 0.36, "drop",   1.5,  "short"),
    Breed("dalmatian",        24,  31,  9.4,  7.4,  10,  6.8, 1.05, 0.47, "drop",   1.1,  "short"),
    Breed("german_shepherd",  20,  35,  10.4, 8,    10,  7,   1.2,  0.42, "prick",  1.35, "short"),
    Breed("golden_retriever", 18,  33,  10.6, 9.6,  9,   7.7, 0.95, 0.52, "drop",   1,    "long"),
    Breed("greyhound",        29,  33,  9,    4.9,  12,  5.2, 1.75, 0.32, "rose",   0.8,  "short"),
    Breed("poodle",           25,  25,  8.6,  5.8,  10,  6.3, 1.4,  0.33, "drop",   1.35, "curly"),
    Breed("pug",              13,  25,  10.6, 9.6,  4,   8.8, 0.05, 0.58, "button", 0.75, "short"),
    Breed("siberian_husky",   20,  31,  10.8, 9.4,  8,   7.7, 0.9,  0.42, "prick",  1,    "long"),
)
# fmt: on
CLASSES = tuple(breed.name for breed in BREEDS)

WHITE_BELOW = {"under": WHITE, "socks": WHITE, "muzzle": WHITE}
TAN_POINTS = {"socks": TAN, "muzzle": TAN, "brows": TAN}
COATS = (  # which base colours a breed has, and the colours of the other parts
    ("beagle", [TAN, RED], dict(saddle=BLACK, **WHITE_BELOW, blaze=WHITE, ear=RED, tip=WHITE)),
    ("beagle", [FAWN], dict(**WHITE_BELOW, blaze=WHITE, ear=APRICOT, tip=WHITE)),
    ("corgi", [RED, GOLD], dict(**WHITE_BELOW, blaze=WHITE)),
    ("corgi", [TAN], dict(saddle=BLACK, **WHITE_BELOW, blaze=WHITE)),
    ("dachshund", [BLACK, CHOCOLATE], TAN_POINTS),
    ("dachshund", [RED], dict(ear=CHOCOLATE)),
    ("dalmatian", [WHITE, CREAM], dict(spots=BLACK, ear=BLACK)),
    ("dalmatian", [WHITE], dict(spots=CHOCOLATE, ear=CHOCOLATE)),
    ("german_shepherd", [TAN, FAWN], dict(saddle=BLACK, muzzle=BLACK, ear=BLACK)),
    ("german_shepherd", [SABLE], dict(saddle=BLACK, muzzle=BLACK, socks=FAWN)),
    ("german_shepherd", [BLACK], {}),
    ("golden_retriever", [GOLD, APRICOT], dict(ear=TAN)),
    ("golden_retriever", [CREAM], dict(ear=GOLD)),
    ("greyhound", [FAWN, BLACK, SLATE, TAN], dict(under=WHITE)),
    ("poodle", [WHITE, BLACK, APRICOT, GREY], {}),
    ("pug", [FAWN, GREY, CREAM], dict(muzzle=BLACK, ear=BLACK)),
    ("pug", [BLACK], {}),
    ("siberian_husky", [GREY, BLACK, RED], dict(**WHITE_BELOW, mask=WHITE, eye=BLUE)),
    ("siberian_husky", [SABLE], dict(**WHITE_BELOW, mask=WHITE)),
)


# Paper and brushes


class Picture(Sheet):
    """A sheet 100 wide. `place` says where a figure of the size 100 goes."""

    def __init__(self, name, size):
        super().__init__(name, size)
        self.place()

    def place(self, scale=1, middle=50 + 50j):
        """From now on the point 50 + 50j of what is drawn lies at `middle`."""
        self.scale = scale
        self.shift = middle - scale * (50 + 50j)
        self.unit = scale * self.canvas / 100

    def at(self, point):
        place = (point * self.scale + self.shift) * self.canvas / 100
        return place.real, place.imag

    def somewhere(self, left, right, top, bottom):
        """A point in these bounds."""
        return complex(self.uniform(left, right), self.uniform(top, bottom))

    def box(self, left, top, right, bottom, colour):
        corners = ((left, top), (right, top), (right, bottom), (left, bottom))
        self.polygon([complex(x, y) for x, y in corners], colour)

    def band(self, top, bottom, colour):
        """A box as wide as the sheet."""
        self.box(-5, top, 105, bottom, colour)

    def limb(self, limb, colour, pen=None, more=0.0):
        """Discs along the points, joined; `more` thickens."""
        for (start, first), (end, second) in zip(limb, limb[1:]):
            side = 1j * (end - start) / (abs(end - start) or 1)
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
        for (start, first), (end, second) in zip(limb, limb[1:] or limb):
            for _ in range(int((abs(end - start) + 2 * first) / size) + 2):
                along = self.random.random()
                edge = polar(first + (second - first) * along, self.uniform(0, 6.3))
                yield start + (end - start) * along + edge, size * self.uniform(0.6, 1.2)


# The place


def sky(picture, horizon):
    """Eight bands, from dark to light, down to the horizon."""
    above = picture.tint((116, 171, 222), 18)
    below = picture.tint((219, 229, 232), 11)
    for k in range(8):
        picture.band(horizon * k / 8, horizon * (k + 1) / 8 + 1, mixed(above, below, k / 7))


def floor(picture, horizon, colour, gaps=0):
    """The ground from the horizon on; its boards or slabs are as wide as the `gaps` are apart."""
    picture.floor = colour  # on which shadows fall
    for k in range(5):
        shade = WHITE if k % 2 else BLACK
        picture.band(horizon + (101 - horizon) * k / 5, 101, mixed(colour, shade, 0.02 * k))
    for k in range(-8, 9) if gaps else ():
        gap = [complex(50 + k * gaps, horizon), complex(50 + k * gaps * 2, 101)]
        picture.line(gap, 0.5, mixed(colour, BLACK, 0.3))


def lawn(picture):
    """Trees, perhaps with a hedge before them; grass with blades and sometimes flowers."""
    horizon = picture.uniform(42, 66)
    sky(picture, horizon)
    greens = ((104, 150, 66), (130, 160, 80), (84, 128, 62), (164, 164, 92))
    grass = picture.tint(picture.choice(greens), 12)
    leaf = mixed(grass, (30, 70, 40), picture.uniform(0.3, 0.7))
    for _ in range(picture.choice((3, 5, 9))):
        x = picture.uniform(0, 100)
        radius = picture.uniform(7, 16)
        picture.box(x - 1.2, horizon - radius, x + 1.2, horizon + 1, (92, 68, 50))
        picture.disc(complex(x, horizon - radius * 1.3), radius, picture.tint(leaf, 14))
    if picture.chance(0.5):
        for x in range(-4, 110, 6):
            bush = complex(x, horizon - picture.uniform(3, 7))
            picture.oval(bush, 7, 9, picture.tint(leaf, 8))

    floor(picture, horizon, grass)
    for _ in range(60):
        foot = picture.somewhere(0, 100, horizon + 1, 100)
        top = foot + complex(picture.uniform(-1, 1), -2.5)
        blade = mixed(grass, picture.choice((BLACK, WHITE, (180, 200, 80))), 0.22)
        picture.line([foot, top], 0.6, picture.tint(blade, 6))
    for _ in range(picture.choice((0, 0, 12))):
        flower = picture.somewhere(0, 100, horizon + 6, 100)
        picture.disc(flower, 1.1, picture.choice((WHITE, (240, 210, 80), (220, 110, 150))))


def beach(picture):
    """The sea with waves, and sand."""
    horizon = picture.uniform(30, 46)
    shore = horizon + 20
    sky(picture, horizon)
    sea = picture.tint(picture.choice(((52, 120, 156), (70, 140, 150), (84, 116, 136))), 12)
    picture.band(horizon, shore, sea)
    for _ in range(7):
        wave = picture.somewhere(-5, 90, horizon + 2, horizon + 16)
        picture.line([wave, wave + picture.uniform(6, 22)], 0.7, mixed(sea, WHITE, 0.5))
    sand = picture.tint(picture.choice(((222, 200, 156), (206, 184, 146), (190, 172, 144))), 10)
    floor(picture, shore, sand)
    surf = [complex(x, shore + 1.5 * math.sin(x / 9)) for x in range(-4, 110, 6)]
    picture.line(surf, 2.2, WHITE)


def street(picture):
    """A wall of bricks, and a pavement."""
    horizon = picture.uniform(56, 70)
    bricks = ((160, 90, 72), (182, 170, 150), (128, 120, 116), (200, 176, 140))
    wall = picture.tint(picture.choice(bricks), 12)
    picture.band(-5, horizon, mixed(wall, WHITE, 0.3))
    for row in range(int(horizon / 7) + 1):
        top = horizon - 7 * row - 6.5
        for k in range(-1, 8):
            left = 14 * k + 7 * (row % 2) + 0.5
            picture.box(left, top, left + 13, top + 6, picture.tint(wall, 8))
    floor(picture, horizon, picture.tint((156, 154, 150), 16), gaps=14)


def room(picture):
    """A wall, a floor of boards, a skirting."""
    horizon = picture.uniform(60, 74)
    walls = ((206, 196, 176), (168, 188, 196), (196, 172, 168), (172, 188, 160), (120, 132, 150))
    wall = picture.tint(picture.choice(walls), 12)
    picture.band(-5, horizon, wall)
    woods = ((170, 122, 80), (140, 98, 66), (196, 156, 112), (112, 84, 66))
    floor(picture, horizon, picture.tint(picture.choice(woods), 10), gaps=8)
    picture.band(horizon - 2.6, horizon + 0.4, mixed(wall, WHITE, 0.6))


PLACES = (lawn, lawn, beach, room, street)


# The dog: its coat


class Frame(namedtuple("Frame", "origin axis side", defaults=[1])):
    """Where a part of the dog is. `axis` is the unit of length in the direction ahead.

    x goes ahead, or to the right of a face, and y down. With a `side` of -1 x goes to the left.
    """

    def at(self, x, y):
        return self.origin + self.axis * complex(self.side * x, y)

    def limb(self, *discs):
        """A limb of discs, each given as x, y and radius."""
        return [(self.at(x, y), radius * abs(self.axis)) for x, y, radius in discs]


def hair(picture, breed, coat, colour, centre, reach):
    """A layer of a colour, and a pen for it.

    Within `reach` of the centre it has strokes for a long coat, curls for a curly one, or spots.
    """
    layer = picture.layer(colour)
    pen = ImageDraw.Draw(layer)
    unit = reach / 34
    for _ in range(70):
        point = centre + picture.somewhere(-reach, reach, -reach, reach)
        if breed.fur == "long":
            stroke = picture.somewhere(-2.5, -1, 1, 3.5) * unit
            shade = mixed(colour, picture.choice((BLACK, WHITE)), picture.uniform(0.05, 0.2))
            picture.line([point, point + stroke], 0.7 * unit, shade, pen)
        elif breed.fur == "curly":
            shade = picture.uniform(0, 0.14)
            picture.disc(point + (0.4 + 0.5j) * unit, 2 * unit, mixed(colour, BLACK, 0.24), pen)
            picture.disc(point, 1.9 * unit, mixed(colour, WHITE, shade), pen)
        elif "spots" in coat:
            spot = picture.somewhere(0.6, 1.7, 0.6, 1.7) * math.sqrt(unit)
            picture.oval(point, spot.real, spot.imag, coat["spots"], pen)
    return layer, pen


def trunk_coat(picture, breed, coat, trunk, length, legs):
    """The coat of the trunk and the legs as a picture, of which the limbs show their part."""
    chest, waist = breed.chest, breed.waist
    layer, pen = hair(picture, breed, coat, coat["base"], trunk.at(length / 2, 0), 34)
    if "saddle" in coat:
        y, radius = -0.55 * waist, 0.8 * chest
        saddle = trunk.limb((-0.3 * waist, y, radius), (length - 0.5 * waist, y, radius))
        picture.limb(saddle, coat["saddle"], pen)
    if "under" in coat:
        under = trunk.limb(
            (length * 0.4, waist, waist * 0.45),
            (length, chest * 0.8, chest * 0.6),
            (length + chest, -chest * 0.2, chest * 0.62),
            (length + chest * 1.1, -chest, chest * 0.5),
        )
        picture.limb(under, coat["under"], pen)
    if "socks" in coat:
        for leg in legs:
            picture.limb([(point, radius * 1.5) for point, radius in leg[-3:]], coat["socks"], pen)
    return layer


def in_contrast(colour, share):
    """A colour that is seen on this one: darker by the share, or lighter if there is no light."""
    if sum(colour) > 220:
        return mixed(colour, BLACK, share)
    return mixed(colour, WHITE, share / 2)


# The dog from the side

GROUND = 88  # where paws stand
ROUGH = {"short": 0, "long": 1.3, "curly": 1.5}  # the edge of a part with such fur

TAILS = {  # points and radii, from the rump on
    "beagle": ((0, 1.8), (-5 - 6j, 1.5), (-7 - 10j, 1.1), (-8 - 13j, 0.8)),
    "corgi": ((3j, 2.4), (-1 + 2j, 2.0)),
    "dachshund": ((0, 1.8), (-5 - 6j, 1.5), (-8 - 13j, 0.8)),
    "dalmatian": ((0, 1.7), (-7 + 3j, 1.4), (-14 + 1j, 1.1), (-18 - 3j, 0.7)),
    "german_shepherd": ((0, 2.2), (-5 + 5j, 2.8), (-7 + 13j, 3.0), (-5 + 20j, 1.4)),
    "golden_retriever": ((0, 2.0), (-7 - 1j, 3.0), (-13 + 2j, 3.4), (-17 + 7j, 1.6)),
    "greyhound": ((0, 1.4), (-4 + 7j, 1.1), (-4 + 14j, 0.9), (-9 + 18j, 0.6)),
    "poodle": ((0, 1.3), (-2 - 5j, 1.2), (-3 - 11j, 4.8)),
    "pug": ((0, 1.7), (-4 - 3j, 1.7), (-3 - 7j, 1.6), (1 - 7j, 1.5), (1 - 4j, 1.3)),
    "siberian_husky": ((0, 2.6), (-4 - 7j, 3.2), (0 - 13j, 3.4), (7 - 14j, 3.0), (10 - 10j, 2.0)),
}


def tail(picture, breed, coat, rump):
    """A tail that wags a little and does not reach into the ground."""
    wag = polar(1, picture.uniform(-0.25, 0.25))
    limb = []
    for point, radius in TAILS[breed.name]:
        place = rump + point * wag
        limb.append((complex(place.real, min(place.imag, GROUND - radius)), radius))
    colour = mixed(coat.get("saddle", coat["base"]), BLACK, 0.06)
    picture.part([limb], colour, shaggy=ROUGH[breed.fur])
    if "tip" in coat:
        picture.part([limb[-2:]], coat["tip"], outline=0)


def front_leg(breed, shoulder, forward):
    """Shoulder, elbow, wrist, heel, toes."""
    bone = 0.3 * breed.waist
    height = GROUND - shoulder.imag
    x = shoulder.real + breed.chest * 0.2
    return [
        (complex(x - 1, shoulder.imag + breed.chest * 0.25), 2.2 * bone),
        (complex(x + forward * 0.2, GROUND - height * 0.5), 1.35 * bone),
        (complex(x + forward * 0.7, GROUND - height * 0.2 - bone), 0.95 * bone),
        (complex(x + forward, GROUND - bone), 0.95 * bone),
        (complex(x + forward + 1.7 * bone, GROUND - bone * 0.8), 0.85 * bone),
    ]


def hind_leg(breed, hip, forward):
    """Hip, knee, hock, heel, toes."""
    bone = 0.3 * breed.waist
    x = hip.real
    return [
        (hip + 1j, breed.waist * 0.92),
        (complex(x + 2.5, GROUND - breed.leg * 0.85), 1.9 * bone),
        (complex(x - 2.6 + forward * 0.6, GROUND - breed.leg * 0.42 - bone * 0.5), bone),
        (complex(x - 2 + forward, GROUND - bone), 0.95 * bone),
        (complex(x - 2 + forward + 1.7 * bone, GROUND - bone * 0.8), 0.85 * bone),
    ]


def standing(picture, breed, coat):
    back = GROUND - breed.leg - breed.chest
    hip = complex(46 - breed.body / 2, back + 1)
    shoulder = complex(46 + breed.body / 2, back)
    stride = picture.uniform(-3.5, 3.5)
    near = [front_leg(breed, shoulder, stride), hind_leg(breed, hip, -stride)]
    far = [front_leg(breed, shoulder, 2.5 - stride), hind_leg(breed, hip, 3 + stride)]
    whole(picture, breed, coat, hip, shoulder, near, far)


def sitting(picture, breed, coat):
    bone = 0.3 * breed.waist
    length = breed.body * 0.84
    hip = complex(36, GROUND - breed.waist)
    rise = (breed.leg + breed.chest * 1.25 - breed.waist) / length
    slope = math.asin(min(0.87, max(0.45, rise)))
    shoulder = hip + polar(length, -slope)
    foot = complex(hip.real + max(breed.waist * 0.8, breed.body * 0.22), GROUND - bone)
    thigh = [
        (hip + 1.5 - 0.5j, breed.waist),
        (complex(hip.real + breed.waist * 0.6, GROUND - bone * 2.4), 2 * bone),
        (foot, bone),
        (foot + 3, bone),
    ]
    near = [front_leg(breed, shoulder, 0), thigh]
    whole(picture, breed, coat, hip, shoulder, near, [front_leg(breed, shoulder, 3)])


def whole(picture, breed, coat, hip, shoulder, near, far):
    """A dog from the side, given where hip, shoulder and legs are.

    Its shadow comes first, then tail and far legs, trunk and neck, the near legs, and at last the
    head.
    """
    chest, waist = breed.chest, breed.waist
    length = abs(shoulder - hip)
    trunk = Frame(hip, (shoulder - hip) / length)
    middle = complex((hip.real + shoulder.real) / 2 + 2, GROUND - 0.5)
    wide = (shoulder.real - hip.real) / 2 + chest + 2
    picture.oval(middle, wide, 2.6, mixed(picture.floor, BLACK, 0.35))
    layer = trunk_coat(picture, breed, coat, trunk, length, near + far)
    tail(picture, breed, coat, trunk.at(-waist * 0.7, -waist * 0.5))
    picture.part(far, layer.point(lambda light: light * 0.72))

    reach = chest * 0.55 + breed.neck + breed.head * 0.5
    head = shoulder + polar(reach, -picture.uniform(0.65, 1.05))
    body = trunk.limb(
        (0, 0, waist),
        (length / 2, (waist - chest) * 0.7, waist * 0.75 + chest * 0.25),
        (length - chest * 0.3, 0, chest),
        (length + 1, 0, chest * 0.96),
    )
    neck = [(shoulder - 0.15j * chest, chest * 0.78), (head - 0.3 * breed.head, breed.head * 0.8)]
    picture.part([body, neck], layer, shaggy=ROUGH[breed.fur])
    picture.part(near, layer, outline=0.35)
    thighs = [leg[:1] for leg in near]
    picture.part([body[1:], neck, *thighs], layer, outline=0)  # hides the lines where legs begin
    if breed.fur == "curly":  # a mane and bracelets
        mane = [(shoulder - 2, chest * 1.12), ((shoulder + head) / 2, chest * 0.8)]
        bracelets = [[(leg[-2][0] - 3j, 3.6)] for leg in near]
        picture.part([mane, *bracelets], layer, outline=0.4, shaggy=1.5)
    collar(picture, neck)
    paint_head(picture, breed, coat, Frame(head, polar(breed.head, picture.uniform(-0.25, 0.3))))


def collar(picture, neck):
    """A collar for every other dog."""
    (below, first), (above, second) = neck[:2]
    middle = (below + above) / 2
    half = 1j * (above - below) / abs(above - below) * (first + second) / 2
    colours = ((190, 40, 44), (40, 80, 170), (40, 130, 90), (230, 180, 50), (140, 60, 140))
    if picture.chance(0.5):
        picture.line([middle - half, middle + half], 1.8, picture.choice(colours))


# The dog from the front


def portrait(picture, breed, coat):
    """The face from the front, often tilted, above neck and chest."""
    bust = Frame(50 + 46j, breed.head)
    colour = coat.get("saddle", coat["base"])
    layer, pen = hair(picture, breed, coat, colour, bust.at(0, 3), 3 * breed.head)
    bib = coat.get("under") or coat.get("socks")
    if bib:
        picture.limb(bust.limb((0, 1.3, 0.5), (0, 4, 0.9)), bib, pen)
    neck = bust.limb((0, 0.6, 0.75), (0, 2.2, 1.05), (0, 5, 1.9))
    picture.part([neck], layer, shaggy=ROUGH[breed.fur])
    collar(picture, neck)
    axis = polar(breed.head, picture.uniform(-0.22, 0.22))
    paint_head(picture, breed, coat, Frame(bust.origin, axis), front=True)


# The dog: its head


def from_the_side(breed):
    """Where the parts of a head are, in its radius: points, or discs with x, y and radius."""
    deep, long = breed.deep, breed.ear
    tip = 0.8 + breed.snout
    ears = {
        "prick": [(-0.3, -0.55, 0.48), (-0.5, -0.6 - long * 0.75, 0.1)],
        "drop": [(-0.4, -0.5, 0.28), (-0.55, 0.1, 0.46), (-0.5, -0.45 + long, 0.36)],
        "button": [(-0.35, -0.66, 0.32), (0.12, -0.62 + long * 0.6, 0.12)],
        "rose": [(-0.45, -0.6, 0.3), (-0.5 - long, -0.3, 0.1)],
    }
    return SimpleNamespace(
        sides=[1],
        ear=ears[breed.ears],
        skull=[(0, 0, 1), (0.12, 0.2, 0.88)],
        topknot=[(-0.15, -0.85, 0.95), (-0.1, -0.5, 0.7)],
        eye=(0.5, -0.14),
        blaze=[(0.6, -0.85, 0.13), (1.1, 0.1, 0.25)],
        snout=[(0.45, 0.28, max(deep * 1.3, 0.58)), (0.85, 0.36, deep * 1.1), (tip, 0.4, deep)],
        nose=(tip + deep * 0.72, 0.4 - deep * 0.5),
        mouth=[
            (tip + deep * 0.55, 0.42 + deep * 0.5),
            (tip * 0.8, 0.42 + deep * 0.72),
            (0.55, 0.78),
        ],
        tongue=[(tip - 0.25, 0.4 + deep * 0.8, 0.2), (tip - 0.3, 0.75 + deep, 0.24)],
    )


def from_the_front(breed):
    """The same, of the right half of a face."""
    narrow = 1.16 - 0.25 * breed.snout  # a long snout goes with a narrow skull
    deep, long = breed.deep, breed.ear
    nose = 0.42 + 0.3 * breed.snout
    wide = 0.14 + 0.35 * deep
    ears = {
        "prick": [(0.55, -0.5, 0.46), (0.8, -0.55 - long * 0.75, 0.1)],
        "drop": [(0.82, -0.5, 0.26), (1.12, 0.1, 0.36), (1.06, -0.5 + long, 0.32)],
        "button": [(0.66, -0.76, 0.3), (1.02, -0.76 + long * 0.65, 0.13)],
        "rose": [(0.6, -0.55, 0.28), (1.25, -0.5, 0.1)],
    }
    return SimpleNamespace(
        sides=[narrow, -narrow],
        ear=ears[breed.ears],
        skull=[(0, -0.1, 0.85 * narrow), (0.28, -0.1, 0.85 * narrow), (0.5, 0.3, 0.62 * narrow)],
        topknot=[(0, -0.95, 0.62), (0, -0.6, 0.6)],
        eye=(0.43, -0.06),
        blaze=[(0, -1.1, 0.14), (0, 0.2, 0.26)],
        snout=[(0, 0.4, 0.3 + deep * 0.6), (0, 0.18 + nose, 0.26 + deep * 0.5)],
        nose=(0, nose),
        mouth=[(0, nose), (0, nose + 0.24), (wide * 0.5, nose + 0.36), (wide, nose + 0.26)],
        tongue=[(0, nose + 0.35, 0.16), (0, nose + 0.62, 0.19)],
    )


def paint_head(picture, breed, coat, head, front=False):
    """Ears behind the skull, skull and snout, ears before the skull, the face."""
    r = breed.head
    parts = from_the_front(breed) if front else from_the_side(breed)
    halves = [Frame(head.origin, head.axis, side) for side in parts.sides]
    snout = head.limb(*parts.snout)
    layer, pen = hair(picture, breed, coat, coat["base"], head.origin, 1.5 * r)
    for half in halves:
        if "mask" in coat:
            picture.limb(half.limb((0.4, 0.75, 0.62), (0.5, 0.2, 0.36)), coat["mask"], pen)
        brow = coat.get("mask", coat.get("brows"))
        if brow:
            x, y = parts.eye
            picture.oval(half.at(x + 0.05, y - 0.35), 0.18 * r, 0.14 * r, brow, pen)
    if "muzzle" in coat:
        picture.limb(snout[-2:], coat["muzzle"], pen, more=0.15 * r)
    if "blaze" in coat:
        picture.limb(head.limb(*parts.blaze), coat["blaze"], pen)

    if not front:
        behind, before = [Frame(head.at(0.5, 0), head.axis)], [head]
    elif breed.ears in ("prick", "rose"):
        behind, before = halves, []
    else:
        behind, before = [], halves
    for place in behind:
        paint_ear(picture, breed, coat, place.limb(*parts.ear))
    skull = [half.limb(*parts.skull) for half in halves]
    picture.part([*skull, snout], layer, shaggy=1.0 if breed.fur == "long" else 0)
    if not front:
        jaw = head.limb((-0.22, 0.22, 0.72), (-0.5, 0.75, 0.56))
        picture.part([jaw], layer, outline=0)  # hides the line where the neck begins
    if breed.fur == "curly":
        picture.part([head.limb(*parts.topknot)], layer, outline=0.4, shaggy=1.5)
    for place in before:
        paint_ear(picture, breed, coat, place.limb(*parts.ear))

    if picture.chance(0.4):
        picture.limb(head.limb(*parts.tongue), PINK)
    for half in halves:
        mouth = [half.at(x, y) for x, y in parts.mouth]
        picture.line(mouth, 0.1 * r, in_contrast(coat.get("muzzle", coat["base"]), 0.6))
        eye = half.at(*parts.eye)
        size = (0.2 if breed.snout < 0.5 else 0.16) * r
        picture.disc(eye, 1.3 * size, in_contrast(coat["base"], 0.55))
        picture.disc(eye, size, coat.get("eye", BROWN))
        picture.disc(eye, 0.66 * size, NOSE)
        picture.disc(eye + size * (0.35 - 0.35j), 0.34 * size, (255, 255, 255))
    picture.oval(head.at(*parts.nose), 0.24 * r, 0.2 * r, NOSE)


def paint_ear(picture, breed, coat, flap):
    """An ear, which differs from the head a little."""
    colour = coat.get("ear", in_contrast(coat["base"], 0.16))
    picture.part([flap], colour, shaggy=1.5 if breed.fur == "curly" else 0)
    if breed.ears == "prick":
        inside = [(point + 0.06j * breed.head, radius * 0.5) for point, radius in flap]
        picture.limb(inside, mixed(colour, PINK, 0.5))


POSES = (standing, standing, sitting, portrait)


if __name__ == "__main__":
    command_line(draw, CLASSES, PER_CLASS)
