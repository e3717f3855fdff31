"""`python -m graphkiln.cli` is the `graphkiln` command."""

from graphkiln.cli.command import main

main()
