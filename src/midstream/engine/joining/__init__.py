"""Matching of rows of two streams."""
