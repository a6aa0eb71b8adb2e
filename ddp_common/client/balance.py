"""Which rank gets which partitions: a plain function of where they lie and how long they are."""

from collections.abc import Sequence

NEARLY = 1.1  # times the mean: so many rows on the fullest rank count as balanced


def assign(lengths: Sequence[int], lies_on: Sequence[int | None], ranks: int) -> list[int]:
    """The rank that gets each partition: where it lies, but for as few as possible.

    `lengths` are rows, `lies_on` the rank on whose worker a partition lies (None: elsewhere).
    Partitions move from the fullest rank to the emptiest while that makes the fullest one less
    full, until it has nearly as many rows as the mean.
    """
    goes_to: list[int] = [-1] * len(lengths)
    rows = [0] * ranks
    for number, place in enumerate(lies_on):
        if place is not None:
            goes_to[number] = place
            rows[place] += lengths[number]
    from_elsewhere = [number for number, place in enumerate(lies_on) if place is None]
    for number in sorted(from_elsewhere, key=lambda number: -lengths[number]):
        goes_to[number] = rows.index(min(rows))
        rows[goes_to[number]] += lengths[number]
    while not is_balanced(rows):
        fullest, emptiest = rows.index(max(rows)), rows.index(min(rows))

        def fuller(number: int) -> int:
            """Rows of the fuller of both ranks, once the partition has moved."""
            return max(rows[fullest] - lengths[number], rows[emptiest] + lengths[number])

        there = [number for number, place in enumerate(goes_to) if place == fullest]
        best = min(there, key=fuller)
        if fuller(best) >= rows[fullest]:
            break
        goes_to[best] = emptiest
        rows[fullest] -= lengths[best]
        rows[emptiest] += lengths[best]
    return goes_to


def is_balanced(rows: Sequence[int]) -> bool:
    """Whether ranks with so many rows each have nearly the same number."""
    return max(rows) <= NEARLY * sum(rows) / len(rows)
