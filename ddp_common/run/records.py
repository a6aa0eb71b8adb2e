"""The records of a run, kept in columns: a report of six numbers takes some 50 bytes, as a dict it would take 600.

Records with the same names and types of values share a table, whose columns are typed arrays; what is neither a number that fits nor
a truth value is kept as it is. Promises: what was appended comes back equal and of the same types, in the same order.
"""

from array import array
from collections.abc import Sequence

FLOAT, INTEGER, TRUTH, OTHER = "d", "q", "b", "O"


class Records(Sequence):
    """A sequence of dicts that are made when they are asked for; to change one changes nothing here. Appending is the only change."""

    def __init__(self, records=()):
        self._tables, self._numbers = (
            [],
            {},
        )  # a list of columns each; (names and kinds) -> number of its table
        self._shapes = []
        self._table, self._row = array("I"), array("I")  # of each record: where it is
        for record in records:
            self.append(record)

    def append(self, record):
        shape = tuple((name, _kind(value)) for name, value in record.items())
        number = self._numbers.get(shape)
        if number is None:
            number = self._add_table(shape)
        table = self._tables[number]
        row = len(table[0]) if table else 0
        for column, value in zip(table, record.values()):
            column.append(value)
        self._table.append(number)
        self._row.append(row)

    def _add_table(self, shape):
        number = self._numbers[shape] = len(self._tables)
        self._shapes.append(shape)
        self._tables.append([[] if kind == OTHER else array(kind) for _, kind in shape])
        return number

    def __len__(self):
        return len(self._table)

    def __getitem__(self, index):
        if isinstance(index, slice):
            return [self._record(number) for number in range(*index.indices(len(self)))]
        number = index + len(self) if index < 0 else index
        if not 0 <= number < len(self):
            raise IndexError(f"record {index} of {len(self)}")
        return self._record(number)

    def _record(self, number):
        table, row = self._table[number], self._row[number]
        values = zip(self._shapes[table], self._tables[table])
        return {
            name: bool(column[row]) if kind == TRUTH else column[row]
            for (name, kind), column in values
        }

    def __eq__(self, other):
        if not isinstance(other, (Records, list)):
            return NotImplemented
        return len(self) == len(other) and all(mine == its for mine, its in zip(self, other))

    __hash__ = None

    def __add__(self, other):
        return [*self, *other]

    def __radd__(self, other):
        return [*other, *self]

    def __repr__(self):
        shown = [repr(record) for record in self[:3]]
        return f"[{', '.join(shown)}{f', … {len(self)} records' if len(self) > 3 else ''}]"

    def frame(self):
        """A pandas DataFrame with a row for each record, as pandas would make it of the dicts."""
        import numpy
        import pandas

        if not self._tables:
            return pandas.DataFrame()
        frames, starts, rows = [], [], 0
        for shape, table in zip(self._shapes, self._tables):
            columns = {name: _column(kind, column) for (name, kind), column in zip(shape, table)}
            length = len(table[0]) if table else self._table.count(len(frames))
            frames.append(pandas.DataFrame(columns, index=range(rows, rows + length)))
            starts.append(rows)
            rows += length
        if len(frames) == 1:
            return frames[0]
        table, row = (
            numpy.array(self._table, dtype=numpy.int64),
            numpy.array(self._row, dtype=numpy.int64),
        )
        order = numpy.array(starts)[table] + row
        return pandas.concat(frames).iloc[order].reset_index(drop=True)


def _kind(value):
    if type(value) is float:
        return FLOAT
    if type(value) is int:
        return INTEGER if -(2**63) <= value < 2**63 else OTHER
    return TRUTH if type(value) is bool else OTHER


def _column(kind, column):
    import numpy

    if kind == OTHER:
        return column
    return numpy.array(
        column, dtype={FLOAT: numpy.float64, INTEGER: numpy.int64, TRUTH: numpy.bool_}[kind]
    )
