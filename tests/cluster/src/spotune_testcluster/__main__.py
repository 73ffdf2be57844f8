"""`python -m spotune_testcluster`, the same as `spotune-testcluster`."""

from spotune_testcluster.cli import main

main()
