from ddp_common.commands.cli import main

main()
