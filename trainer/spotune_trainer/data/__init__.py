"""From raw text to the tensors of a step.

``prepare`` writes raw files as tokenised MDS shards (``inputs`` reads them, ``text`` makes tokens of rows, ``packing``
fills rows). ``schedule`` says which samples a step trains on, ``shards`` reads them by id, ``cache`` keeps what was
downloaded, ``batches`` makes tensors of them, and ``loader`` does so ahead of the training loop.
"""
