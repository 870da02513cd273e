"""`python -m allranks ...`, for torchrun and for machines where the command is not on the path."""

import sys

from allranks.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
