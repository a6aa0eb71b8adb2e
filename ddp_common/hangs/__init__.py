"""Ranks that wait for each other: which of them is to blame, whoever has started them."""
