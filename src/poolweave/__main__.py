"""`python -m poolweave` is the command `poolweave`."""

from poolweave.serving.cli import main

main()
