"""Tests of rows with labels."""
