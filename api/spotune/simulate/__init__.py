"""What a job would come to on the spot nodes of a trace: a simulation of how it is run, without running it.

``trace.py`` reads how many nodes there were, ``supply.py`` says which of them the job holds, ``simulation.py`` trains
on them, in the words of ``terms.py``. ``measured.py`` takes its times from a real run; ``compare.py``, ``table.py`` and
``command.py`` are `spotune simulate`.
"""
