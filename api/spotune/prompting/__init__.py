"""Prompts of an exported model, built as in training: template, special tokens and truncation."""
