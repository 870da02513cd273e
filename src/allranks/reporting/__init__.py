"""What a Run directory says, in words: the report reads the journal and needs nothing but the directory.

It imports no torch: a report is made on any machine that can read the files.
"""
