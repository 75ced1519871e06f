"""Where arrays live: the placement of states and batches."""
