"""Several ranks, one checkpoint. docs/explanation/ranks.md shows every message of a save and a load.

Rank 0 is the *coordinator*, the others are *followers*; their halves stand side by side:

    what                        coordinator          follower           between them
    a save of a directory       coordinator_save     follower_save      commit_agreement
    a file that all write       coordinator_file     follower_file      file_agreement
    several file systems        node_local.publishing (CoordinatorStores, FollowerStore), node_local.detection

`group_save` is where both begin. Below them: `connections` (frames), `coordination` (ranks that have met) with `peers`,
`sessions` (one save), `messages`. What is planned: `partition`, `replica_check`, `shared_file`. Loads: `shared_reader`,
`common_steps`, and `node_local.split_step` with `node_local.exchange` where a step lies in parts.
`stop_agreement` lets all ranks save the same step when some of them were told to end.
"""
