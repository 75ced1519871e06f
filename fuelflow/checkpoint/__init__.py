"""Whole runs on disk: written while training goes on, and brought back to the bit."""
