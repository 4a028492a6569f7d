"""A directory of steps: save, load, retention, signals, merge.

Where to look:

    the class                    checkpointer
    save                         saves (when, and over what) → step_saver (its files); signal_save when the job is told
                                 to end, within its grace period
    load                         step_loader
    the directory                root: its lock, its steps, and the rules by which they stay
    the ranks                    meeting
    beside it                    explain (what a save would do), overview (for notebooks), merge (one file of parts)
"""
