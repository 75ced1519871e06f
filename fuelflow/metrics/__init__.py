"""What an epoch did, on every rank, and how a run develops: host values only."""
