"""`python -m graphkiln.cli` is the `graphkiln` command."""

from graphkiln.cli.main import main

main()
