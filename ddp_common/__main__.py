from ddp_common.cli import main

main()
