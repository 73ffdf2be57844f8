"""The command line `spotune`: its entry point, plugins of the other packages, and the commands of this package."""
