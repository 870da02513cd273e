"""How processes come to be, as values: the environment is read once, here, into one frozen value.

It imports no torch, so that a login node can plan and render a submission at once.
"""
