"""The process that is launched: the worker's loop, the demo Task, and the two other doors.

`door.py` is `allranks.join` for people who keep their own loop, and `load.py` is `allranks.load`, which gives a
trained model back on one device.
"""
