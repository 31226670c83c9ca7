"""Formats of traces: each module reads one, and says what is wrong with a file by line and column."""
