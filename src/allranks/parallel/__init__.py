"""The one way in which a Layout is applied to a model.

`parallelize` takes the user's module and a mesh and returns the modules that a step runs, with a ParameterMap that
says who every parameter is. One mesh axis is one file; `parallelize.py` alone knows their order. Training, verify and
dryrun all go through it.
"""
