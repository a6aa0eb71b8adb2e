"""Draws dogs of ten breeds: a stand-in for photographs of dogs where they cannot be downloaded. Not photographs.

    python data/dogs/draw.py FOLDER

writes FOLDER/<breed>/<breed><number>.png, 150 pictures of each. A breed is an anatomy (legs, trunk, neck, muzzle, ears, tail) and a few
coats; the coats of different breeds share their colours, and pose, place, light and distance vary, so that shape and coat together make
the breed. A part of a dog is a limb: a list of (point, radius), discs joined to one another. Points are complex numbers with y downwards;
the picture is 100 wide, and a dog faces to the right until it is mirrored.

Promises: a picture depends on its class, number and size and on nothing else. Every call gives the same bytes; so do other
machines of the same kind with the same versions of Pillow and NumPy. Needs no fonts, no files, no network.
"""

import cmath
import math
import random
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFilter

SEED = 2011
PER_CLASS = 150
FINER = 3  # drawn so many times larger, then reduced: smooth edges

BLACK, WHITE, TAN, RED, CHOCOLATE, FAWN = (44, 41, 44), (240, 236, 228), (192, 136, 82), (162, 88, 46), (94, 60, 44), (212, 178, 132)
GREY, GOLD, CREAM, SABLE, SLATE, APRICOT = (142, 142, 148), (214, 166, 94), (236, 218, 182), (126, 100, 72), (104, 112, 124), (222, 170, 118)
BROWN, BLUE, PINK, NOSE = (66, 42, 28), (120, 178, 214), (226, 128, 132), (30, 26, 28)


@dataclass
class Breed:
    """Lengths in hundredths of the picture's width; those of muzzle and ears in radii of the head."""
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
    coats: tuple
    fur: str = "short"  # short, long, curly


BREEDS = {
    "beagle": Breed(17, 31, 9.5, 8.2, 7, 7.4, 0.85, 0.5, "hanging", 1.55, "rod", (
        dict(base=TAN, saddle=BLACK, under=WHITE, socks=WHITE, muzzle=WHITE, blaze=WHITE, ear=RED, tip=WHITE),
        dict(base=RED, saddle=BLACK, under=WHITE, socks=WHITE, muzzle=WHITE, blaze=WHITE, ear=RED, tip=WHITE),
        dict(base=FAWN, under=WHITE, socks=WHITE, muzzle=WHITE, blaze=WHITE, ear=APRICOT, tip=WHITE))),
    "corgi": Breed(7.5, 37, 10, 9.4, 7, 7.8, 0.85, 0.38, "pricked", 1.5, "none", (
        dict(base=RED, under=WHITE, socks=WHITE, muzzle=WHITE, blaze=WHITE),
        dict(base=GOLD, under=WHITE, socks=WHITE, muzzle=WHITE, blaze=WHITE),
        dict(base=TAN, saddle=BLACK, under=WHITE, socks=WHITE, muzzle=WHITE, blaze=WHITE)), "long"),
    "dachshund": Breed(6, 44, 7.8, 6.8, 8, 6.2, 1.35, 0.36, "hanging", 1.5, "rod", (
        dict(base=RED, ear=CHOCOLATE), dict(base=BLACK, socks=TAN, muzzle=TAN, brows=TAN), dict(base=CHOCOLATE, socks=TAN, muzzle=TAN, brows=TAN))),
    "dalmatian": Breed(24, 31, 9.4, 7.4, 10, 6.8, 1.05, 0.47, "hanging", 1.1, "sabre", (
        dict(base=WHITE, spots=BLACK, ear=BLACK), dict(base=WHITE, spots=CHOCOLATE, ear=CHOCOLATE), dict(base=CREAM, spots=BLACK, ear=WHITE))),
    "german_shepherd": Breed(20, 35, 10.4, 8, 10, 7, 1.2, 0.42, "pricked", 1.35, "bushy", (
        dict(base=TAN, saddle=BLACK, muzzle=BLACK, ear=BLACK), dict(base=FAWN, saddle=BLACK, muzzle=BLACK, ear=SABLE), dict(base=BLACK),
        dict(base=SABLE, saddle=BLACK, muzzle=BLACK, socks=FAWN))),
    "golden_retriever": Breed(18, 33, 10.6, 9.6, 9, 7.7, 0.95, 0.52, "hanging", 1.0, "plume", (
        dict(base=GOLD, ear=TAN), dict(base=CREAM, ear=GOLD), dict(base=APRICOT, under=GOLD, ear=TAN)), "long"),
    "greyhound": Breed(29, 33, 9, 4.9, 12, 5.2, 1.75, 0.32, "rose", 0.8, "thin", (
        dict(base=FAWN, under=WHITE), dict(base=BLACK, under=WHITE), dict(base=TAN, brindle=BROWN), dict(base=SLATE, under=WHITE, socks=WHITE))),
    "poodle": Breed(25, 25, 8.6, 5.8, 10, 6.3, 1.4, 0.33, "hanging", 1.35, "pom", (
        dict(base=WHITE), dict(base=BLACK), dict(base=APRICOT), dict(base=GREY)), "curly"),
    "pug": Breed(13, 25, 10.6, 9.6, 4, 8.8, 0.05, 0.58, "folded", 0.75, "curl", (
        dict(base=FAWN, muzzle=BLACK, ear=BLACK), dict(base=BLACK), dict(base=GREY, muzzle=BLACK, ear=BLACK),
        dict(base=CREAM, muzzle=BLACK, ear=BROWN))),
    "siberian_husky": Breed(20, 31, 10.8, 9.4, 8, 7.7, 0.9, 0.42, "pricked", 1.0, "sickle", (
        dict(base=GREY, under=WHITE, socks=WHITE, muzzle=WHITE, mask=WHITE, eye=BLUE),
        dict(base=BLACK, under=WHITE, socks=WHITE, muzzle=WHITE, mask=WHITE, eye=BLUE),
        dict(base=RED, under=WHITE, socks=WHITE, muzzle=WHITE, mask=WHITE, eye=BLUE),
        dict(base=SABLE, under=WHITE, socks=WHITE, muzzle=WHITE, mask=WHITE)), "long"),
}
CLASSES = tuple(BREEDS)


class Picture:
    """A canvas 100 wide with a source of random numbers of its own. `place` says where a figure of size 100 goes."""

    def __init__(self, name, size):
        self.random = random.Random(name)  # seeded by the text itself: the same in every process
        self.uniform, self.choice, self.chance = self.random.uniform, self.random.choice, lambda p: self.random.random() < p
        self.canvas = FINER * size
        self.image = Image.new("RGB", (self.canvas, self.canvas))
        self.pen = ImageDraw.Draw(self.image)
        self.place()

    def place(self, scale=1.0, middle=50 + 50j, mirrored=False):
        """From now on the point 50 + 50j of what is drawn lies at `middle`."""
        self.scale, self.shift, self.mirrored = scale, middle - scale * (50 + 50j), mirrored
        self.unit = scale * self.canvas / 100

    def at(self, point):
        point = (point * self.scale + self.shift) * self.canvas / 100
        return (self.canvas - point.real if self.mirrored else point.real), point.imag

    def tint(self, colour, by=10):
        """A colour near `colour`: its brightness differs by up to `by`, each channel by a third of that."""
        brightness = self.uniform(-by, by)
        return tuple(max(0, min(255, round(channel + brightness + self.uniform(-by, by) / 3))) for channel in colour)

    def polygon(self, points, colour, pen=None):
        (pen or self.pen).polygon([self.at(point) for point in points], colour)

    def box(self, corner, opposite, colour):
        self.polygon([corner, complex(opposite.real, corner.imag), opposite, complex(corner.real, opposite.imag)], colour)

    def line(self, points, width, colour, pen=None):
        (pen or self.pen).line([self.at(point) for point in points], colour, max(1, round(width * self.unit)), "curve")

    def oval(self, centre, wide, high, colour, pen=None):
        (x, y), wide, high = self.at(centre), wide * self.unit, high * self.unit
        (pen or self.pen).ellipse((x - wide, y - high, x + wide, y + high), colour)

    def limb(self, limb, colour, pen=None, more=0.0):
        """Discs along the points, joined; `more` thickens."""
        for (start, first), (end, second) in zip(limb, limb[1:]):
            across = 1j * (end - start) / (abs(end - start) or 1)
            self.polygon([start + across * (first + more), end + across * (second + more), end - across * (second + more),
                          start - across * (first + more)],
                         colour, pen)
        for point, radius in limb:
            self.oval(point, radius + more, radius + more, colour, pen)

    def part(self, limbs, coat, outline=0.55, shaggy=0.0):
        """Limbs that belong together, with one dark outline around them, in the colour or the picture `coat`; `shaggy` roughens the edge."""
        mask = Image.new("L", self.image.size)
        pen = ImageDraw.Draw(mask)
        limbs = limbs + [[tuft] for limb in limbs for tuft in self.tufts(limb, shaggy)] if shaggy else limbs
        dark = tuple(channel * 11 // 20 for channel in (coat if isinstance(coat, tuple) else coat.getpixel((0, 0))))
        for limb in limbs:
            self.limb(limb, dark, more=outline / self.scale)
        for limb in limbs:
            self.limb(limb, 255, pen)
        self.image.paste(coat, (0, 0), mask)

    def tufts(self, limb, size):
        """Small discs on the edge of a limb."""
        for (start, first), (end, second) in zip(limb, limb[1:]):
            across = 1j * (end - start) / (abs(end - start) or 1)
            for k in range(int(abs(end - start) / size) + 2):
                along = self.random.random()
                edge = across * (first + (second - first) * along) * self.choice((-1, 1))
                yield start + (end - start) * along + edge, size * self.uniform(0.7, 1.3)
        for point, radius in limb[-1:]:
            for k in range(int(radius * 4 / size)):
                yield point + cmath.rect(radius, self.uniform(0, 6.3)), size * self.uniform(0.6, 1.1)


def mixed(colour, other, share):
    return tuple(round(a * (1 - share) + b * share) for a, b in zip(colour, other))


def body_coat(p, breed, coat, hip, shoulder, legs):
    """The trunk's coat as a picture, of which the limbs show their part: saddle, white below, socks, spots, stripes, texture."""
    layer = Image.new("RGB", p.image.size, coat["base"])
    pen, spine = ImageDraw.Draw(layer), (shoulder - hip) / abs(shoulder - hip)
    up, length = -1j * spine, abs(shoulder - hip)
    texture(p, pen, coat["base"], breed.fur, (hip + shoulder) / 2, 34)
    if "saddle" in coat:
        steps = [hip - spine * breed.waist * 0.5 + spine * (length + breed.waist * 0.3) * k / 6 for k in range(7)]
        p.limb([(point + up * breed.waist * 0.55, breed.chest * p.uniform(0.72, 0.95)) for point in steps], coat["saddle"], pen)
    if "under" in coat:
        p.limb([(hip + spine * length * 0.4 - up * breed.waist, breed.waist * 0.45), (shoulder - up * breed.chest * 0.8, breed.chest * 0.6),
                (shoulder + spine * breed.chest * 1.05 + up * breed.chest * 0.2, breed.chest * 0.62),
                (shoulder + spine * breed.chest * 1.1 + up * breed.chest * 1.0, breed.chest * 0.5)], coat["under"], pen)
    for leg in legs if "socks" in coat else ():
        p.limb([(point, radius * 1.5) for point, radius in leg[-3:]], coat["socks"], pen)
    for k in range(18 if "brindle" in coat else 0):
        foot = hip + spine * length * (k / 14 - 0.15)
        p.line([foot + up * breed.chest, foot + spine * p.uniform(-2, 2) - up * breed.chest], p.uniform(0.5, 0.9),
               mixed(coat["base"], coat["brindle"], 0.6), pen)
    if "spots" in coat:
        spots(p, pen, coat["spots"], (hip + shoulder) / 2 + 4j, 40, 1.0)
    return layer


def spots(p, pen, colour, centre, reach, size):
    for _ in range(70):
        p.oval(centre + complex(p.uniform(-reach, reach), p.uniform(-reach, reach)), size * p.uniform(0.8, 2), size * p.uniform(0.8, 1.8),
               colour, pen)


def texture(p, pen, colour, fur, centre, reach):
    """Hair: strokes for a long coat, curls for a curly one."""
    unit = reach / 34
    for _ in range({"short": 0, "long": 60, "curly": 90}[fur]):
        point = centre + complex(p.uniform(-reach, reach), p.uniform(-reach, reach))
        if fur == "long":
            p.line([point, point + complex(p.uniform(-2.5, -1), p.uniform(1, 3.5)) * unit], 0.7 * unit,
                   mixed(colour, p.choice((BLACK, WHITE)), p.uniform(0.05, 0.2)), pen)
        else:
            p.oval(point + (0.4 + 0.5j) * unit, 2 * unit, 2 * unit, mixed(colour, BLACK, 0.24), pen)
            p.oval(point, 1.9 * unit, 1.9 * unit, mixed(colour, WHITE, p.uniform(0.0, 0.14)), pen)


def tail(p, breed, coat, rump, ground):
    wag = p.uniform(-0.25, 0.25)
    points, radii = {
        "rod": ((0, -5 - 6j, -8 - 13j), (1.8, 1.5, 0.8)), "sabre": ((0, -7 + 3j, -14 + 1j, -18 - 3j), (1.7, 1.4, 1.1, 0.7)),
        "plume": ((0, -7 - 1j, -13 + 2j, -17 + 7j), (2.0, 3.0, 3.4, 1.6)), "bushy": ((0, -5 + 5j, -7 + 13j, -5 + 20j), (2.2, 2.8, 3.0, 1.4)),
        "sickle": ((0, -4 - 7j, 0 - 13j, 7 - 14j, 10 - 10j), (2.6, 3.2, 3.4, 3.0, 2.0)),
        "thin": ((0, -4 + 7j, -4 + 14j, -9 + 18j), (1.4, 1.1, 0.9, 0.6)),
        "curl": ((0, -4 - 3j, -3 - 7j, 1 - 7.5j, 2 - 4j, -1 - 3.4j), (1.7, 1.7, 1.6, 1.5, 1.4, 1.1)),
        "pom": ((0, -2 - 5j, -3 - 11j), (1.3, 1.2, 4.8)),
        "none": ((0, -1.2 - 0.8j), (2.4, 2.0)),
    }[breed.tail]
    places = [rump + point * cmath.rect(1, wag) for point in points]
    limb = [(complex(place.real, min(place.imag, ground - radius)), radius) for place, radius in zip(places, radii)]
    colour = mixed(coat.get("saddle", coat["base"]), BLACK, 0.06)
    p.part([limb], colour, shaggy=1.2 if breed.tail in ("plume", "bushy", "sickle") else 0)
    if "tip" in coat:
        p.part([limb[-1:], [(mixed_point(limb, 0.6), 1.2), limb[-1]]], coat["tip"], 0)
    if breed.tail == "pom":
        p.part([limb[-1:]], colour, shaggy=1.3)


def mixed_point(limb, share):
    return limb[-2][0] * (1 - share) + limb[-1][0] * share


def shadow(p, left, right, ground):
    p.oval(complex((left + right) / 2, ground - 0.5), (right - left) / 2, 2.6, mixed(p.floor, BLACK, 0.35))


def front_leg(breed, shoulder, ground, forward):
    w, x = 1.4 + breed.waist * 0.13, shoulder.real + breed.chest * 0.2
    return [(complex(x - 1, shoulder.imag + breed.chest * 0.25), 2.2 * w), (complex(x + forward * 0.2, ground - max(breed.leg, 6) * 0.8), 1.35 * w),
            (complex(x + forward * 0.7, ground - breed.leg * 0.3 - w), 0.95 * w), (complex(x + forward, ground - w), 0.95 * w),
            (complex(x + forward + 1.7 * w, ground - w * 0.8), 0.85 * w)]


def back_leg(breed, hip, ground, forward):
    w, x = 1.4 + breed.waist * 0.13, hip.real
    return [(hip + 1j, breed.waist * 0.92), (complex(x + 2.5, ground - max(breed.leg, 6) * 0.85), 1.9 * w),
            (complex(x - 2.6 + forward * 0.6, ground - breed.leg * 0.42 - 0.5 * w), w),
            (complex(x - 2 + forward, ground - w), 0.95 * w), (complex(x + forward + 1.7 * w - 2, ground - w * 0.8), 0.85 * w)]


def standing(p, breed, coat):
    ground = 88
    hip = complex(46 - breed.length / 2, ground - breed.leg - breed.chest * 0.95)
    shoulder = complex(46 + breed.length / 2, ground - breed.leg - breed.chest)
    if breed.tail == "bushy":
        hip += 2.5j
    stride = p.uniform(-3.5, 3.5)
    near = [front_leg(breed, shoulder, ground, stride), back_leg(breed, hip, ground, -stride)]
    far = [front_leg(breed, shoulder, ground - 1.2, 2.5 - stride), back_leg(breed, hip, ground - 1.2, 3 + stride)]
    whole(p, breed, coat, hip, shoulder, near, far, ground)


def lying(p, breed, coat):
    ground, w = 86, 1.5 + breed.waist * 0.14
    hip, shoulder = complex(46 - breed.length / 2, ground - breed.waist), complex(46 + breed.length / 2, ground - breed.chest - 1.5)
    reach = 9 + breed.leg * 0.35
    near = [[(shoulder + 4j, 2.2 * w), (complex(shoulder.real + 4, ground - w), 1.3 * w), (complex(shoulder.real + reach, ground - w), w),
             (complex(shoulder.real + reach + 2, ground - w), w)],
            [(hip + 2 + 1j, breed.waist * 0.95), (complex(hip.real + 4, ground - 2 * w), 2 * w), (complex(hip.real + 8, ground - w), w),
             (complex(hip.real + 6 + reach * 0.6, ground - w), w)]]
    far = [[(point + 3.5 - 0.8j, radius) for point, radius in near[0]]]
    whole(p, breed, coat, hip, shoulder, near, far, ground)


def sitting(p, breed, coat):
    ground, w = 90, 1.4 + breed.waist * 0.13
    hip = complex(36, ground - breed.waist * 1.02)
    rise = min(0.87, max(0.45, (breed.leg * 0.95 + breed.chest * 1.25 - breed.waist) / (breed.length * 0.84)))
    shoulder = hip + breed.length * 0.84 * complex(math.sqrt(1 - rise * rise), -rise)
    x = shoulder.real + breed.chest * 0.25
    legs = [[(shoulder + 3j, 2.4 * w), (complex(x + shift, (shoulder.imag + ground) / 2), 1.4 * w), (complex(x + shift, ground - 3 * w), w),
             (complex(x + shift, ground - w), w),
             (complex(x + shift + 1.7 * w, ground - w), 0.9 * w)] for shift in (0, 3)]
    foot = max(hip.real + breed.waist * 0.8, hip.real + breed.length * 0.22)
    thigh = [(hip + 1.5 - 0.5j, breed.waist * 1.0), (complex(hip.real + breed.waist * 0.6, ground - 2.4 * w), 2 * w), (complex(foot, ground - w), w),
             (complex(foot + 3, ground - w), w)]
    whole(p, breed, coat, hip, shoulder, [legs[0], thigh], [legs[1]], ground)


def whole(p, breed, coat, hip, shoulder, near, far, ground):
    """A dog from the side, given where hip, shoulder and legs are."""
    shadow(p, hip.real - breed.waist, shoulder.real + breed.chest + 4, ground)
    layer = body_coat(p, breed, coat, hip, shoulder, near + far)
    spine = (shoulder - hip) / abs(shoulder - hip)
    tail(p, breed, coat, hip - spine * breed.waist * 0.7 - 1j * spine * breed.waist * (0.5 if breed.tail != "none" else 0.2), ground)
    p.part(far, layer.point([round(value * 0.72) for value in range(256)] * 3))
    angle = p.uniform(0.7, 1.1) - (0.15 if breed.muzzle < 0.5 else 0)
    head = shoulder + cmath.rect(breed.chest * 0.55 + breed.neck + breed.head * 0.5, -angle)
    trunk = [(hip, breed.waist), ((hip + shoulder) / 2 - 1j * spine * (breed.chest - breed.waist) * 0.7, (breed.waist * 0.75 + breed.chest * 0.25)),
             (shoulder - spine * breed.chest * 0.3, breed.chest), (shoulder + spine, breed.chest * 0.96)]
    neck = [(shoulder - 0.15j * breed.chest, breed.chest * 0.78), (head - 0.3 * breed.head, breed.head * 0.8)]
    edge = {"short": 0, "long": 1.3, "curly": 1.5}[breed.fur]
    p.part([trunk, neck], layer, shaggy=edge)
    p.part(near, layer, outline=0.35)
    p.part([trunk[1:], neck, near[0][:1], near[1][:1]], layer, 0)
    if breed.fur == "curly":
        curls(p, breed, coat, shoulder, near, head)
    if p.chance(0.35):
        collar(p, neck)
    head_side(p, breed, coat, head, p.uniform(-0.25, 0.3))


def curls(p, breed, coat, shoulder, legs, head):
    """A poodle's mane and bracelets."""
    layer = Image.new("RGB", p.image.size, mixed(coat["base"], WHITE, 0.06))
    texture(p, ImageDraw.Draw(layer), coat["base"], "curly", shoulder + 10j, 34)
    p.part([[(shoulder - 2, breed.chest * 1.12), ((shoulder + head) / 2, breed.chest * 0.8)]], layer, 0.4, 1.5)
    for leg in legs:
        p.part([[(leg[-2][0] - 3j, 4.0)]], layer, 0.4, 1.3)


def collar(p, neck):
    (below, first), (above, second) = neck
    middle, across = below * 0.42 + above * 0.58, 1j * (above - below) / abs(above - below) * (first * 0.42 + second * 0.58)
    p.line([middle - across, middle + across], 1.8, p.choice(((190, 40, 44), (40, 80, 170), (40, 130, 90), (230, 180, 50), (140, 60, 140))))
    p.oval(middle + across * 0.8 + 1.4j, 1.1, 1.1, (230, 200, 90))


def head_coat(p, breed, coat, local, r, frontal):
    """The coat of the head as a picture: muzzle, blaze, mask, brows, spots. `local` turns lengths in radii of the head into points."""
    layer = Image.new("RGB", p.image.size, coat["base"])
    pen, m, d = ImageDraw.Draw(layer), breed.muzzle, breed.deep
    texture(p, pen, coat["base"], breed.fur, local(0, 0), 1.5 * r)
    if "spots" in coat:
        spots(p, pen, coat["spots"], local(0.2, 0), 1.8 * r, r * 0.1)
    side = (-1, 1) if frontal else (1,)
    for x in side if "mask" in coat else ():
        p.limb([(local(x * 0.4, 0.75), 0.62 * r), (local(x * 0.5, 0.2), 0.36 * r)], coat["mask"], pen)
        p.oval(local(x * (0.42 if frontal else 0.62), -0.5), 0.22 * r, 0.16 * r, coat["mask"], pen)
    if "muzzle" in coat:
        p.limb([(local(0, 0.35), (0.42 + d * 0.5) * r), (local(0, 0.6 + 0.3 * m), 0.9 * r)] if frontal else
               [(local(0.85, 0.4), d * 1.3 * r), (local(1.2 + m, 0.4), d * 1.6 * r)], coat["muzzle"], pen)
    if "blaze" in coat:
        p.limb([(local(0, -1.1), 0.14 * r), (local(0, 0.2), 0.26 * r)] if frontal else [(local(0.6, -0.85), 0.13 * r), (local(1.1, 0.1), 0.25 * r)],
               coat["blaze"], pen)
    for x in side if "brows" in coat else ():
        p.oval(local(x * (0.4 if frontal else 0.52), -0.42), 0.15 * r, 0.12 * r, coat["brows"], pen)
    return layer


def ear_colour(coat):
    """An ear stands out from the head a little: darker, and lighter on a black dog."""
    return coat.get("ear", mixed(coat["base"], BLACK, 0.14) if sum(coat["base"]) > 200 else mixed(coat["base"], WHITE, 0.09))


def seam(coat):
    """The colour of the mouth's line, which must show on a dark muzzle too."""
    around = coat.get("muzzle", coat["base"])
    return mixed(around, BLACK, 0.6) if sum(around) > 250 else mixed(around, WHITE, 0.16)


def eye(p, coat, centre, radius):
    p.oval(centre, radius * 1.35, radius * 1.2, mixed(coat["base"], BLACK, 0.55) if sum(coat["base"]) > 250 else (120, 100, 84))
    p.oval(centre, radius, radius, coat.get("eye", BROWN))
    p.oval(centre, radius * 0.66, radius * 0.66, NOSE)
    p.oval(centre + radius * (0.35 - 0.35j), radius * 0.34, radius * 0.34, (255, 255, 255))


def head_side(p, breed, coat, centre, tilt):
    r, m, d = breed.head, breed.muzzle, breed.deep

    def local(x, y):
        return centre + cmath.rect(r, tilt) * complex(x, y)

    layer, ear = head_coat(p, breed, coat, local, r, False), ear_colour(coat)
    shapes = {"pricked": ((-0.3, -0.55, 0.48), (-0.5, -0.6 - breed.ear * 0.75, 0.1)),
              "hanging": ((-0.4, -0.5, 0.28), (-0.55, 0.1, 0.46), (-0.5, -0.45 + breed.ear, 0.36)),
              "folded": ((-0.35, -0.66, 0.32), (0.12, -0.62 + breed.ear * 0.6, 0.12)),
              "rose": ((-0.45, -0.6, 0.3), (-0.5 - breed.ear, -0.3, 0.1))}
    flap = [(local(x, y), radius * r) for x, y, radius in shapes[breed.ears]]
    if breed.ears == "pricked":
        p.part([[(point + cmath.rect(r * 0.6, tilt), radius) for point, radius in flap]], mixed(ear, BLACK, 0.3))
    tip = 0.8 + m
    muzzle = [(local(0.45, 0.28), max(d * 1.3, 0.58) * r), (local(tip, 0.4), d * r)]
    if p.chance(0.35):
        p.limb([(local(tip - 0.25, 0.4 + d * 0.8), 0.2 * r), (local(tip - 0.3, 0.75 + d), 0.24 * r)], PINK)
    p.part([[(local(0, 0), r), (local(0.12, 0.2), 0.88 * r)], muzzle], layer, shaggy=0.9 if breed.fur == "long" else 0)
    p.part([[(local(0.3, 0.1), 0.5 * r), (local(0.9, 0.35), d * r)], [(local(-0.22, 0.22), 0.72 * r), (local(-0.5, 0.75), 0.56 * r)]], layer, 0)
    p.line([local(tip + d * 0.55, 0.42 + d * 0.5), local(tip * 0.8, 0.42 + d * 0.72), local(0.55, 0.78)], 0.11 * r, seam(coat))
    p.oval(local(tip + d * 0.72, 0.4 - d * 0.5), 0.25 * r, 0.21 * r, NOSE)
    eye(p, coat, local(0.5, -0.14), (0.2 if m < 0.5 else 0.16) * r)
    if breed.fur == "curly":
        p.part([[(local(-0.15, -0.85), 0.95 * r), (local(-0.1, -0.5), 0.7 * r)]], layer, 0.4, 0.24 * r)
    p.part([flap], ear, shaggy={"short": 0, "long": 0, "curly": 0.25}[breed.fur] * r)
    if breed.ears == "pricked":
        p.limb([(point + 0.08 * r, radius * 0.45) for point, radius in flap], mixed(ear, PINK, 0.5))


def profile(p, breed, coat):
    """Head and neck from the side, near."""
    r, middle = breed.head, 50 + 50j
    neck = [(middle + complex(-0.35, 0.2) * r, 0.85 * r), (middle + complex(-1.2, 2.4) * r, 1.5 * r), (middle + complex(-1.5, 6) * r, 2.6 * r)]
    layer = body_coat(p, breed, coat, middle + complex(-5, 6.5) * r, middle + complex(-1, 3.9) * r, [])
    p.part([neck], layer, shaggy={"short": 0, "long": 1.2, "curly": 1.6}[breed.fur])
    if p.chance(0.5):
        collar(p, neck[1::-1])
    head_side(p, breed, coat, middle, p.uniform(-0.3, 0.15))


def portrait(p, breed, coat):
    """The face from the front, often tilted."""
    r, m, d, tilt = breed.head, breed.muzzle, breed.deep, p.uniform(-0.22, 0.22)
    narrow = 1.16 - 0.25 * m

    def local(x, y):
        return 50 + 46j + cmath.rect(r, tilt) * complex(x, y)

    layer, ear = head_coat(p, breed, coat, local, r, True), ear_colour(coat)
    chest(p, breed, coat, r, narrow)
    behind, front = {"pricked": (((0.55, -0.5, 0.46), (0.8, -0.55 - breed.ear * 0.75, 0.1)), None),
                     "hanging": (None, ((0.82, -0.5, 0.26), (1.12, 0.1, 0.36), (1.06, -0.5 + breed.ear, 0.32))),
                     "folded": (None, ((0.66, -0.76, 0.3), (1.02, -0.76 + breed.ear * 0.65, 0.13))),
                     "rose": (((0.6, -0.55, 0.28), (1.25, -0.5, 0.1)), None)}[breed.ears]
    for x in (-1, 1) if behind else ():
        flap = [(local(x * side * narrow, y), radius * r) for side, y, radius in behind]
        p.part([flap], ear)
        p.limb([(point + 0.06j * r, radius * 0.5) for point, radius in flap], mixed(ear, PINK, 0.5))
    cheek = 0.55 if breed.fur == "long" else 0.42
    skull = [(local(-0.28 * narrow, -0.1), 0.85 * narrow * r), (local(0.28 * narrow, -0.1), 0.85 * narrow * r)]
    p.part([skull, [(local(-cheek * narrow, 0.3), 0.62 * narrow * r), (local(cheek * narrow, 0.3), 0.62 * narrow * r)],
            [(local(0, 0.4), (0.3 + d * 0.6) * r), (local(0, 0.6 + 0.28 * m), (0.26 + d * 0.5) * r)]], layer,
            shaggy=1.0 if breed.fur == "long" else 0)
    if breed.fur == "curly":
        p.part([[(local(0, -0.95), 0.62 * r), (local(0, -0.6), 0.6 * r)]], layer, 0.4, 0.26 * r)
    for x in (-1, 1) if front else ():
        p.part([[(local(x * side * narrow, y), radius * r) for side, y, radius in front]], ear, shaggy=0.25 * r if breed.fur == "curly" else 0)
    for x in (-1, 1):
        eye(p, coat, local(x * 0.43 * narrow, -0.06), (0.21 if m < 0.5 else 0.16) * r)
    snout(p, breed, coat, local, r)


def snout(p, breed, coat, local, r):
    """Nose, mouth and tongue from the front; a pug's wrinkles."""
    m, d = breed.muzzle, breed.deep
    bottom, dark, wide = 0.42 + 0.3 * m, seam(coat), 0.14 + d * 0.35
    if p.chance(0.45):
        p.limb([(local(0, bottom + 0.35), 0.16 * r), (local(0, bottom + 0.62), 0.19 * r)], PINK)
    p.line([local(-wide, bottom + 0.26), local(-wide * 0.5, bottom + 0.36), local(0, bottom + 0.24), local(wide * 0.5, bottom + 0.36),
            local(wide, bottom + 0.26)], 0.08 * r, dark)
    p.line([local(0, bottom), local(0, bottom + 0.26)], 0.08 * r, dark)
    p.limb([(local(-0.1, bottom - 0.04), 0.13 * r), (local(0.1, bottom - 0.04), 0.13 * r), (local(0, bottom + 0.06), 0.11 * r)], NOSE)
    p.oval(local(-0.06, bottom - 0.1), 0.07 * r, 0.035 * r, (120, 116, 120))
    for y in (-0.55, -0.4) if m < 0.5 else ():
        p.line([local(-0.3, y), local(0, y - 0.09), local(0.3, y)], 0.07 * r, mixed(coat["base"], BLACK, 0.35))


def chest(p, breed, coat, r, narrow):
    neck = [(50 + 46j + 0.6j * r, 0.75 * narrow * r), (50 + 46j + 2.2j * r, (1.05 + 0.1 * breed.waist / breed.leg) * narrow * r),
            (50 + 46j + 5j * r, 1.9 * r)]
    layer = Image.new("RGB", p.image.size, coat.get("saddle", coat["base"]))
    pen = ImageDraw.Draw(layer)
    texture(p, pen, coat["base"], breed.fur, 50 + 46j + 3j * r, 3 * r)
    if "spots" in coat:
        spots(p, pen, coat["spots"], 50 + 46j + 3j * r, 3 * r, r * 0.12)
    if "under" in coat or "socks" in coat:
        p.limb([(50 + 46j + 1.3j * r, 0.5 * r), (50 + 46j + 4j * r, 0.9 * r)], coat.get("under", coat.get("socks")), pen)
    p.part([neck], layer, shaggy={"short": 0, "long": 1.2, "curly": 1.8}[breed.fur])
    if p.chance(0.5):
        collar(p, [(50 + 46j + 2.4j * r, 1.3 * narrow * r), (50 + 46j + 1.0j * r, 0.9 * narrow * r)])


def sky(p, horizon, above, below):
    for k in range(8):
        p.box(complex(-5, horizon * k / 8), complex(105, horizon * (k + 1) / 8 + 1), mixed(above, below, k / 7))


def floor(p, horizon, colour):
    """The ground from the horizon on, and its colour for the shadows that fall on it."""
    p.floor = colour
    for k in range(5):
        p.box(complex(-5, horizon + (101 - horizon) * k / 5), complex(105, 101), mixed(colour, WHITE if k % 2 else BLACK, 0.02 * k))


def lawn(p):
    horizon, grass = p.uniform(42, 66), p.tint(p.choice(((104, 150, 66), (130, 160, 80), (84, 128, 62), (164, 164, 92))), 12)
    sky(p, horizon, p.tint((120, 172, 224), 16), p.tint((214, 230, 238), 10))
    leaf = mixed(grass, (30, 70, 40), p.uniform(0.3, 0.7))
    kind = p.choice(("trees", "hedge", "fence"))
    for k in range(p.choice((3, 5, 9)) if kind != "fence" else 0):
        x, r = p.uniform(0, 100), p.uniform(7, 16)
        p.box(complex(x - 1.2, horizon - r), complex(x + 1.2, horizon + 1), (92, 68, 50))
        p.oval(complex(x, horizon - r * 1.3), r, r, p.tint(leaf, 14))
    if kind == "hedge":
        for x in range(-4, 110, 6):
            p.oval(complex(x, horizon - p.uniform(3, 7)), 7, 9, p.tint(leaf, 8))
    if kind == "fence":
        wood = p.tint(p.choice((WHITE, (170, 130, 90), (140, 110, 90))), 10)
        for y in (15, 6):
            p.box(complex(-5, horizon - y), complex(105, horizon - y + 2.5), mixed(wood, BLACK, 0.15))
        for x in range(-3, 105, 8):
            p.polygon([complex(x, horizon + 1), complex(x, horizon - 18), complex(x + 2.4, horizon - 21), complex(x + 4.8, horizon - 18),
                       complex(x + 4.8, horizon + 1)], wood)
    floor(p, horizon, grass)
    for _ in range(60):
        at = complex(p.uniform(0, 100), p.uniform(horizon + 1, 100))
        p.line([at, at + complex(p.uniform(-1, 1), -2.5)], 0.6, p.tint(mixed(grass, p.choice((BLACK, WHITE, (180, 200, 80))), 0.22), 6))
    for _ in range(p.choice((0, 0, 12))):
        p.oval(complex(p.uniform(0, 100), p.uniform(horizon + 6, 100)), 1.1, 1.1, p.choice((WHITE, (240, 210, 80), (220, 110, 150))))


def beach(p):
    horizon = p.uniform(30, 46)
    sky(p, horizon, p.tint((110, 170, 220), 20), p.tint((224, 228, 226), 12))
    sea = p.tint(p.choice(((52, 120, 156), (70, 140, 150), (84, 116, 136))), 12)
    p.box(complex(-5, horizon), 105 + 101j, sea)
    for _ in range(7):
        at = complex(p.uniform(-5, 90), p.uniform(horizon + 2, horizon + 16))
        p.line([at, at + p.uniform(6, 22)], 0.7, mixed(sea, WHITE, 0.5))
    if p.chance(0.5):
        at = complex(p.uniform(8, 92), horizon)
        p.polygon([at - 1j, at - 13j, at + 7 - 2j], WHITE)
        p.polygon([at - 5 - 1j, at + 7 - 1j, at + 5 + 1.5j, at - 4 + 1.5j], p.choice(((170, 50, 40), (60, 60, 80))))
    sand = p.tint(p.choice(((222, 200, 156), (206, 184, 146), (190, 172, 144))), 10)
    floor(p, horizon + 20, sand)
    p.line([complex(x, horizon + 20 + 1.5 * math.sin(x / 9)) for x in range(-4, 110, 6)], 2.2, WHITE)
    for _ in range(30):
        p.oval(complex(p.uniform(0, 100), p.uniform(horizon + 24, 100)), 1.2, 0.5, mixed(sand, BLACK, p.uniform(0.05, 0.2)))


def snow(p):
    horizon, white = p.uniform(46, 64), p.tint((226, 232, 242), 10)
    sky(p, horizon, p.tint((150, 178, 208), 24), p.tint((226, 226, 232), 8))
    for _ in range(p.choice((3, 6, 9))):
        x, high = p.uniform(0, 100), p.uniform(16, 34)
        for k in range(3):
            top, wide = horizon - high * (1 - 0.24 * k), high * (0.16 + 0.09 * k)
            p.polygon([complex(x, top), complex(x - wide, top + high * 0.42), complex(x + wide, top + high * 0.42)], p.tint((54, 88, 76), 8))
            p.polygon([complex(x, top), complex(x - wide * 0.5, top + high * 0.18), complex(x + wide * 0.3, top + high * 0.2)], white)
    floor(p, horizon, white)
    for _ in range(5):
        p.oval(complex(p.uniform(0, 100), p.uniform(horizon, 100)), p.uniform(12, 30), p.uniform(2, 5),
               mixed(white, (170, 190, 220), p.uniform(0.1, 0.4)))
    p.flakes = p.choice((0, 0, 40))


def autumn(p):
    horizon, earth = p.uniform(44, 62), p.tint((150, 112, 70), 12)
    sky(p, horizon, p.tint((190, 206, 216), 14), p.tint((236, 224, 200), 8))
    for _ in range(8):
        x, r = p.uniform(-5, 105), p.uniform(9, 18)
        p.box(complex(x - 1.6, horizon - r), complex(x + 1.6, horizon + 1), (84, 62, 48))
        p.oval(complex(x, horizon - r * 1.3), r, r * 0.95, p.tint(p.choice(((206, 132, 50), (184, 84, 44), (214, 170, 70), (130, 120, 60))), 12))
    floor(p, horizon, earth)
    for _ in range(70):
        p.oval(complex(p.uniform(0, 100), p.uniform(horizon, 100)), 1.5, 0.9,
               p.tint(p.choice(((206, 132, 50), (184, 84, 44), (222, 180, 80), (120, 84, 52))), 12))


def room(p):
    horizon = p.uniform(60, 74)
    wall = p.tint(p.choice(((206, 196, 176), (168, 188, 196), (196, 172, 168), (172, 188, 160), (222, 216, 204), (120, 132, 150),
                            (214, 190, 120))), 12)
    p.box(-5 - 5j, complex(105, horizon), wall)
    if p.chance(0.4):
        for x in range(-4, 105, 9):
            p.box(complex(x, -5), complex(x + 4, horizon), mixed(wall, WHITE, 0.14))
    corner = complex(p.uniform(4, 62), p.uniform(4, 16))
    if p.chance(0.5):
        p.box(corner, corner + 32 + 30j, WHITE)
        p.box(corner + 2 + 2j, corner + 30 + 28j, p.tint((156, 198, 226), 14))
        p.box(corner + 15, corner + 17 + 30j, WHITE)
        p.box(corner + 14j, corner + 32 + 16j, WHITE)
    else:
        p.box(corner, corner + 22 + 18j, p.choice(((92, 62, 44), BLACK, (200, 170, 90))))
        p.box(corner + 2 + 2j, corner + 20 + 16j, p.tint(p.choice(((180, 200, 170), (220, 180, 140), (140, 170, 200))), 14))
    if p.chance(0.5):
        tiles(p, horizon)
    else:
        wood = p.tint(p.choice(((170, 122, 80), (140, 98, 66), (196, 156, 112), (112, 84, 66))), 10)
        floor(p, horizon, wood)
        for k in range(-8, 9):
            p.line([complex(50 + k * 8, horizon), complex(50 + k * 17, 101)], 0.5, mixed(wood, BLACK, 0.3))
    p.box(complex(-5, horizon - 2.6), complex(105, horizon + 0.4), mixed(wall, WHITE, 0.6))


def tiles(p, horizon):
    light, dark = p.tint((222, 218, 208), 10), p.tint(p.choice(((170, 90, 70), (110, 120, 130), (90, 130, 120), (180, 170, 156))), 10)
    floor(p, horizon, mixed(light, dark, 0.5))
    rows = [horizon + (104 - horizon) * share for share in (0, 0.14, 0.34, 0.62, 1)]
    for j, (top, bottom) in enumerate(zip(rows, rows[1:])):
        for k in range(-6, 6):
            near, far = ((y - horizon + 30) / 30 * 11 for y in (bottom, top))
            p.polygon([complex(50 + k * far, top), complex(50 + (k + 1) * far, top), complex(50 + (k + 1) * near, bottom),
                       complex(50 + k * near, bottom)],
                      light if (j + k) % 2 else dark)


def sofa(p):
    room(p)
    cloth = p.tint(p.choice(((150, 60, 60), (70, 96, 130), (110, 130, 100), (180, 150, 110), (96, 90, 100), (200, 190, 176), (190, 140, 60))), 12)
    top, seat = p.uniform(30, 42), p.uniform(70, 76)
    p.limb([(complex(6, top + 6), 6), (complex(94, top + 6), 6), (complex(94, seat), 6), (complex(6, seat), 6)], mixed(cloth, BLACK, 0.12))
    p.box(complex(6, top + 6), complex(94, seat), mixed(cloth, BLACK, 0.12))
    p.line([complex(50, top + 2), complex(50, seat)], 0.8, mixed(cloth, BLACK, 0.35))
    p.limb([(complex(9, seat + 9), 9), (complex(91, seat + 9), 9)], cloth)
    p.box(complex(0, seat + 9), complex(100, 101), cloth)
    p.line([complex(0, 94), complex(100, 94)], 0.8, mixed(cloth, BLACK, 0.35))
    for x in (0, 100):
        p.limb([(complex(x, seat - 12), 7), (complex(x, 101), 7)], mixed(cloth, WHITE, 0.1))
    if p.chance(0.6):
        p.limb([(complex(p.choice((18, 82)), seat - 8), 8), (complex(p.choice((18, 82)), seat - 10), 8)],
               p.tint(p.choice(((230, 200, 90), WHITE, (90, 140, 150), (180, 80, 90))), 10))
    p.floor = cloth


def street(p):
    horizon = p.uniform(56, 70)
    wall = p.tint(p.choice(((160, 90, 72), (182, 170, 150), (128, 120, 116), (200, 176, 140))), 12)
    p.box(-5 - 5j, complex(105, horizon), mixed(wall, WHITE, 0.3))
    for row in range(int(horizon / 7) + 1):
        for k in range(-1, 8):
            corner = complex(k * 14 + 7 * (row % 2) + 0.5, horizon - 7 * (row + 1) + 0.5)
            p.box(corner, corner + 13 + 6j, p.tint(wall, 8))
    if p.chance(0.5):
        x = p.choice((8, 72))
        p.box(complex(x, horizon - 50), complex(x + 20, horizon), p.tint(p.choice(((60, 90, 120), (120, 50, 50), (60, 100, 80), (90, 70, 60))), 10))
    floor(p, horizon, p.tint((156, 154, 150), 16))
    for k in range(-5, 6):
        p.line([complex(50 + k * 14, horizon), complex(50 + k * 26, 101)], 0.5, mixed(p.floor, BLACK, 0.3))
    p.line([complex(-5, horizon + 12), complex(105, horizon + 12)], 0.6, mixed(p.floor, BLACK, 0.3))


PLACES = (lawn, lawn, beach, snow, autumn, room, sofa, street)
POSES = (standing, standing, standing, standing, sitting, sitting, sitting, lying, profile, portrait, portrait, portrait)


def thing(p):
    """Something that lies about."""
    at = complex(p.choice((p.uniform(5, 22), p.uniform(78, 95))), p.uniform(88, 95))
    colour = p.choice(((200, 50, 44), (240, 200, 60), (60, 120, 190), (90, 160, 80), WHITE))
    kind = p.choice(("ball", "bowl", "bone", "flowers"))
    if kind == "ball":
        p.oval(at, 5, 5, mixed(colour, BLACK, 0.3))
        p.oval(at - 0.6 - 0.6j, 4.2, 4.2, colour)
        p.line([at - 4 - 1j, at - 0.5 + 0.6j, at + 3.4 - 1j], 0.9, WHITE)
    if kind == "bowl":
        p.polygon([at - 6 - 3j, at + 6 - 3j, at + 8 + 4j, at - 8 + 4j], colour)
        p.oval(at - 3j, 6, 1.8, mixed(colour, BLACK, 0.5))
    if kind == "bone":
        p.limb([(at - 5, 1.5), (at + 5, 1.5)], WHITE)
        for end in (-5 - 1.4j, -5 + 1.4j, 5 - 1.4j, 5 + 1.4j):
            p.oval(at + end, 1.9, 1.9, WHITE)
    if kind == "flowers":
        p.polygon([at - 4 - 4j, at + 4 - 4j, at + 3 + 4j, at - 3 + 4j], (170, 96, 66))
        for _ in range(6):
            top = at + complex(p.uniform(-6, 6), p.uniform(-17, -9))
            p.line([at - 4j, top], 0.8, (70, 120, 60))
            p.oval(top, 2.2, 2.2, colour)


def draw(label: str, number: int, size: int = 64) -> np.ndarray:
    """Picture `number` of the class `label`: RGB bytes of the shape (size, size, 3). Raises ValueError for a class that is not in CLASSES."""
    if label not in CLASSES:
        raise ValueError(f"No breed {label!r} is drawn. There is: {', '.join(CLASSES)}.")
    breed, p = BREEDS[label], Picture(f"{SEED} {label} {number}", size)
    coat = {part: p.tint(colour, 12) for part, colour in p.choice(breed.coats).items()}
    p.flakes = 0
    p.choice(PLACES)(p)
    if p.chance(0.4):
        thing(p)
    pose, mirrored = p.choice(POSES), p.chance(0.5)
    if pose in (profile, portrait):
        ahead = breed.muzzle * breed.head if pose is profile else 0
        nearer = p.uniform(54, 69) / (2.3 * breed.head + (ahead or 0.6 * breed.ear * breed.head))
        p.place(nearer, complex(50 - 0.45 * ahead * nearer + p.uniform(-7, 7), p.uniform(42, 55)), mirrored)
    else:
        extent = max(breed.length + breed.chest + breed.neck + breed.head * (1 + breed.muzzle),
                     breed.leg + 2 * breed.chest + breed.neck + 2.4 * breed.head)
        nearer = p.uniform(0.87, 1.12) * 75 / extent
        p.place(nearer, complex(50 + p.uniform(-6, 6), p.uniform(85, 95) - 38 * nearer), mirrored)
    pose(p, breed, coat)
    return photographed(p, size)


def photographed(p, size):
    """The drawing in the light of the day: reduced, blurred a little, tinted, in patches lighter and darker, with a sensor's noise."""
    p.place()
    for _ in range(p.flakes):
        p.oval(complex(p.uniform(0, 100), p.uniform(0, 100)), 0.8, 0.8, (255, 255, 255))
    image = p.image.reduce(FINER).filter(ImageFilter.GaussianBlur(p.uniform(0.0, 0.3) * size / 64))
    noise = np.random.default_rng(p.random.getrandbits(64))
    patches = Image.fromarray(noise.normal(1, 0.035, (5, 5)).astype(np.float32)).resize((size, size), Image.Resampling.BICUBIC)
    light = p.uniform(0.74, 1.14) * np.array([1 + p.uniform(-0.09, 0.09), 1.0, 1 + p.uniform(-0.12, 0.12)])
    haze, contrast = p.uniform(0, 22), p.uniform(0.8, 1.05)
    picture = np.asarray(image, np.float32) * np.asarray(patches)[:, :, None] * light.astype(np.float32) * contrast + haze
    picture += noise.normal(0, p.uniform(1, 3.5), picture.shape).astype(np.float32)
    return np.clip(picture, 0, 255).astype(np.uint8)


if __name__ == "__main__":
    from ddp_common.datasets import draw_all

    draw_all(draw, CLASSES, PER_CLASS, Path(sys.argv[1]))
