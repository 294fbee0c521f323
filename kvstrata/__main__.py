"""`python -m kvstrata`, the same as the command `kvstrata`."""

from kvstrata.cli import main

main()
