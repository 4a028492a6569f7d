"""A directory of steps: save, load, retention, signals, merge.

Where to look:

    the class                    checkpointer
    save                         step_saver; signal_save when the job is told to end
    load                         step_loader
    the directory                root: its lock, its steps, and the rules by which they stay
    beside it                    explain (what a save would do), merge (one file from parts or shards)
"""
