"""Text that may be anybody's (a file, a log, a name, a server), shown so that a terminal obeys none of it."""


def printable(text: str) -> str:
    """`text` on one line, with what a terminal would obey, or not show, written as `repr` writes it."""
    return "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in text)


def printable_lines(text: str) -> str:
    """The same of text that may have several lines, and tabs in them."""
    return "\n".join("\t".join(map(printable, line.split("\t"))) for line in text.split("\n"))
