"""The command line: a command parses, makes one library call and renders what comes back. It imports no torch."""
