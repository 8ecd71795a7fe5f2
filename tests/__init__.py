"""Tests mirror the tree; tests/tiny.py makes the small model they share."""
