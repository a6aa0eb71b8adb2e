"""The records of a run, kept in columns: a report of six numbers takes about 50 bytes, a dict 600.

Records with the same names and types of values share a table, whose columns are typed arrays; a
value that is neither a number that fits nor a truth value is kept as it is. Promises: what was
appended comes back equal, of the same types, in the same order.
"""

from array import array
from collections.abc import Iterable, Sequence

# Kinds of columns; the first three are typecodes of `array`.
FLOAT = "d"
INTEGER = "q"
TRUTH = "b"
OTHER = "O"


class Records(Sequence):
    """A sequence of dicts that are made when they are asked for; appending is the only change.

    To change one of the dicts changes nothing here.
    """

    def __init__(self, records: Iterable[dict] = ()):
        self._tables: list[list] = []  # each is a list of columns
        self._shapes: list[tuple] = []  # of each table: the (name, kind) of its columns
        self._numbers: dict[tuple, int] = {}  # shape -> number of its table
        # Where each record is: the number of its table, and its row there.
        self._table = array("I")
        self._row = array("I")
        for record in records:
            self.append(record)

    def append(self, record: dict):
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
        number = len(self._tables)
        self._numbers[shape] = number
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
        table = self._table[number]
        row = self._row[number]
        record = {}
        for (name, kind), column in zip(self._shapes[table], self._tables[table]):
            value = column[row]
            record[name] = bool(value) if kind == TRUTH else value
        return record

    def __eq__(self, other):
        if not isinstance(other, (Records, list)):
            return NotImplemented
        return len(self) == len(other) and all(mine == its for mine, its in zip(self, other))

    __hash__ = None  # type: ignore[assignment]  # Python itself says it so

    def __add__(self, other):
        return [*self, *other]

    def __radd__(self, other):
        return [*other, *self]

    def __repr__(self):
        shown = [repr(record) for record in self[:3]]
        more = f", … {len(self)} records" if len(self) > 3 else ""
        return f"[{', '.join(shown)}{more}]"

    def frame(self):
        """A pandas DataFrame with a row for each record, as pandas would make of the dicts."""
        # pandas takes its time to import, and not every run is asked for a table
        import numpy
        import pandas

        if not self._tables:
            return pandas.DataFrame()
        frames = []
        starts = []  # of each frame: its first row in all frames put together
        rows = 0
        for shape, table in zip(self._shapes, self._tables):
            columns = {name: _column(kind, column) for (name, kind), column in zip(shape, table)}
            length = len(table[0]) if table else self._table.count(len(frames))
            frames.append(pandas.DataFrame(columns, index=range(rows, rows + length)))
            starts.append(rows)
            rows += length
        if len(frames) == 1:
            return frames[0]
        table = numpy.array(self._table, dtype=numpy.int64)
        row = numpy.array(self._row, dtype=numpy.int64)
        order = numpy.array(starts)[table] + row
        return pandas.concat(frames).iloc[order].reset_index(drop=True)


def _kind(value):
    if type(value) is float:
        return FLOAT
    if type(value) is int:
        return INTEGER if -(2**63) <= value < 2**63 else OTHER
    if type(value) is bool:
        return TRUTH
    return OTHER


def _column(kind, column):
    import numpy

    if kind == OTHER:
        return column
    types = {FLOAT: numpy.float64, INTEGER: numpy.int64, TRUTH: numpy.bool_}
    return numpy.array(column, dtype=types[kind])
