"""A checkpoint is a committed directory that any Layout can load; it is whole or absent.

`checkpoint.py` knows the directory without torch: manifest, digests of files, retention. `save.py` writes it from
shards without gathering them, and `restore.py` reads it into shards cut in any other way. Nothing on disk is ever
unpickled.
"""
