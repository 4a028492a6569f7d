"""The plan of all ranks for a save of sharded state by a Checkpointer, on the coordinator, for thousands of ranks.

    what a rank holds, as columns of numbers        held_items
    which rank writes what of it                    assignment
    `.metadata`, pickled once for a plan            kept_metadata

`plan_agreement` sends the first, and what of the second is a rank's own.
"""
