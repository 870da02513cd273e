"""Starting the workers of this machine and outliving their ends.

Torchelastic's agent inside the command, the fork server that starts workers with torch imported, and
`allranks.launch`. No worker outlives its parent by more than two seconds.
"""
