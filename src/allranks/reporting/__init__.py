"""What a Run directory or a Plan says, in words, charts and pages.

It imports no torch: a report is made on any machine that can read the files, and the journal alone is enough.
"""
