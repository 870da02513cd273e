"""One optimizer step, whoever asks for it: run the micro-steps, agree on the counts, clip, update.

Also what surrounds a step and has to mean the same everywhere: optimizer, schedule, evaluation. Training, verify and
dryrun share it, because a rehearsal that runs other code proves nothing.
"""
