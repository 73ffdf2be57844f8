"""Preparation of training data: raw text files to tokenized MDS shards.

``inputs`` finds the files, splits them into parts and reads rows. ``parts`` tokenizes one part into shards; ``packing``
packs short documents into rows. ``process_pool`` writes parts in several processes. ``assemble`` joins them into one
dataset. ``prepare`` runs all of it.
"""
