"""Batches of named fields, from rows in memory, in files or in a stream."""
