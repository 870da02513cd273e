"""What a Layout costs on a Cluster, which one is the best, and why not the others: values in, values out.

It imports no torch, so that a login node answers in milliseconds.
"""
