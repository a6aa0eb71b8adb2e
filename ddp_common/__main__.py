"""`python -m ddp_common …`: the command line."""

from ddp_common.commands.cli import main

main()
