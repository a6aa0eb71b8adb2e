"""`python -m tutorials …`: the commands of the course, which the Makefile calls."""

from tutorials.kit.cli import main

main()
