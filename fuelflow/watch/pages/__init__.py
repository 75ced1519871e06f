"""The page of a run, or of several: a file, or served while the run goes on."""
