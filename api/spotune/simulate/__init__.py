"""Simulates a job on a trace of spot nodes, to predict goodput, cost and finishing time without running it.

``trace.py`` reads the number of spot nodes over time. ``supply.py`` computes which nodes the job holds.
``simulation.py`` runs the job on them, by the rules of ``commits.py`` and the decisions of ``resizing.py``.
``terms.py`` defines its inputs and outputs. ``measured.py`` takes timings from a real run. ``compare.py`` runs several
scenarios.
"""
