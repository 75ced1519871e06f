"""Expressions that are recorded and run as one program, and the Graph."""
