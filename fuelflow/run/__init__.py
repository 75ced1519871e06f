"""Running epochs: the trainer, its account of each epoch, and its handle."""
