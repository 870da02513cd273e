"""Proof that a distributed run computes what one device computes.

The reference is a plain one-process torch loop that imports nothing of parallel/, training/ or data/.
"""
