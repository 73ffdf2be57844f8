"""Raw rows to token ids and labels: the columns that are read, their text, and its tokens."""
