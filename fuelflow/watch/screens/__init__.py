"""What a run looks like in a terminal, a notebook, or as lines: views of its story."""
