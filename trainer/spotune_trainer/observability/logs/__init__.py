"""Logs of a run: the format of lines, messages for ledger events, and all files merged by time."""
