"""What developers run: set-up, and the pages that are generated from the code."""
