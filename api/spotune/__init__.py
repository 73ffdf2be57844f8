"""What operator and trainer share: the FinetuneJob API, memory planning, the retry policy and the command line."""
