"""Saves and loads sharded state in the files of torch.distributed.checkpoint (DCP), or HuggingFace's (`huggingface`).

                                 by torch.distributed.checkpoint     by a Checkpointer
    a save begins in             storage_writer, async_stager        save_state
    who writes what              save_planner                        plan_agreement, with plan_comparison; global_plan
    held until it is written     capture                             capture
    a load begins in             storage_reader                      load_state → target_plan; node_local_load

Both write by part_writer (blobs one after the other) and read by part_reader. metadata is what lies where, coverage
proves that nothing is missing, checkpoint_directory keeps the other files of a directory, inspection lists and
verifies.
"""
