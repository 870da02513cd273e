"""Programs that tests run as a user would: Task files and scripts."""
