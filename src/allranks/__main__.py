"""`python -m allranks ...`, for torchrun and for machines where the command is not on the path."""

from allranks.cli.main import command

if __name__ == "__main__":
    command()
