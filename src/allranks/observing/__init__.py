"""What a worker writes down about itself: journal, TensorBoard, where the time went, how much memory it took.

A step never waits for it. The training thread hands over a record whose reduction may still be under way; a
background thread writes it when the numbers are there.
"""
