"""Runs a model whose weights stay on disk: `fastpersist.stream`.

Where to look:

    what the user calls          stream
    which weights a source has   source, which matching brings together with the model's
    which module needs what      units: cut from the model, with the blocks of the files that each one reads
    what stays in memory         residency
    where the others go          ring (places), reading (memory and requests)
    what is read when            prefetch, which order foretells
    parameters without values    binding
    what a model refuses         guards
    gradients through weights    backward

`ring`, `order` and `residency` are about integers alone.
"""
