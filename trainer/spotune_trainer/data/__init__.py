"""Training data: from raw text files to the batches of a step.

``preparation`` writes raw files as tokenized MDS shards, once per job; ``rows`` is its text half, with ``chat`` and
``labels`` for their row formats, and ``stores`` finds and copies raw files. In training, ``datasets`` opens the job's
shards, ``schedule`` and ``mixture_schedule`` define which samples step k trains on, ``loader`` prefetches this
rank's micro-batches, ``batches`` pads them into tensors, ``shards`` reads samples by id, and ``cache`` keeps downloaded
shards on the node.
"""
