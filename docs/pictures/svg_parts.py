"""What the programs that draw the pictures share: words, arrows, and the frame of an SVG file."""

from xml.sax.saxutils import escape


def text(x, y, words, size=13, colour="#222222", weight="normal", anchor="middle"):
    return (
        f'<text x="{x}" y="{y}" font-size="{size}" font-weight="{weight}" fill="{colour}" '
        f'text-anchor="{anchor}">{escape(words)}</text>'
    )


def arrow(colour, begin, end, both_ways=False):
    """A line between two points (x, y); `colour` is one of those given to `picture`."""
    marker = f"url(#head-{colour[1:]})"
    start = f' marker-start="{marker}"' if both_ways else ""
    return (
        f'<line x1="{begin[0]}" y1="{begin[1]}" x2="{end[0]}" y2="{end[1]}" stroke="{colour}" '
        f'stroke-width="2"{start} marker-end="{marker}"/>'
    )


def head(colour):
    return (
        f'<marker id="head-{colour[1:]}" viewBox="0 0 10 10" refX="10" refY="5" markerWidth="7" '
        f'markerHeight="7" orient="auto-start-reverse"><path d="M0 0 L10 5 L0 10 z" '
        f'fill="{colour}"/></marker>'
    )


def picture(width, height, title, description, colours, parts):
    """A whole file: `parts` on white, with a title and a text for those who cannot see it.

    `colours` are those of the arrows.
    """
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" role="img" aria-labelledby="title description" '
        'font-family="sans-serif">',
        f'<title id="title">{escape(title)}</title>',
        f'<desc id="description">{escape(description)}</desc>',
        "<defs>",
        *[head(colour) for colour in colours],
        "</defs>",
        f'<rect width="{width}" height="{height}" fill="white"/>',
        *parts,
        "</svg>",
    ]
    return "\n".join(lines) + "\n"
