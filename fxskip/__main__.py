"""`python -m fxskip` is the command `fxskip`."""

from fxskip.cli import main

main()
