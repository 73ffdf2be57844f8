"""The folder of one job on its volume: its layout, and the files that driver and supervisor share."""
