"""`spotune sweep`: the trials of a FinetuneSweep, as a table and as an HTML page."""
