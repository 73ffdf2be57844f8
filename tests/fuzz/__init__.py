"""Fuzzing of every parser that reads what others write: files of users, volumes and data, requests and responses.

``make fuzz`` runs each for as long as it is told, and `test_fuzz.py` runs each for a second.
"""
