"""What a job would come to on the spot nodes of a trace: a simulation of how it is run, without running it.

``trace.py`` reads how many nodes there were, ``supply.py`` says which of them the job holds, ``simulation.py`` trains
on them, ``measured.py`` takes its times from a real run, ``command.py`` and ``table.py`` are `spotune simulate`.
"""
