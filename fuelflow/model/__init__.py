"""What is trained: names and patterns, and models made functional."""
