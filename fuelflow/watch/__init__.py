"""What a person looks at: consoles, notebooks, pages, and the tools they use."""
