"""Several ranks, one checkpoint. docs/explanation/ranks.md shows every message of a save and a load.

Rank 0 is the *coordinator*, the others are *followers*; their halves stand side by side:

    what                        coordinator          follower           between them
    a save of a directory       coordinator_save     follower_save      commit_agreement
    a file that all write       coordinator_file     follower_file      file_agreement
    several file systems        node_local.publishing (CoordinatorStores, FollowerStore), node_local.detection

`group_save` begins both. Below them: `connections` (frames), `coordination` (connected ranks) with `peers`, `sessions`
(one save), `messages`. Planning: `partition`, `replica_check`, `shared_file`. Loads: `shared_reader`, `common_steps`,
and for a step in parts `node_local.split_step` with `node_local.exchange`. `stop_agreement` lets all ranks save the
same step when some of them were told to end.
"""
