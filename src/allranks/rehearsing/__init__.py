"""The cluster that is not there: the real program at full size on one machine, and runs of days that nobody can try."""
