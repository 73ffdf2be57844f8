"""How a row becomes text and what is learned from it, told from the columns.

`choose` decides. `answers`, `preferences`, `labels` and `related_texts` know one kind of rows each, by the names of
columns that published datasets use. `given` reads the options that name columns. `fitting` checks
that columns fit.
"""
