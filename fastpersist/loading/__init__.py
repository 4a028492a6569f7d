"""File to object: opened and proven, unpickled, filled in place, inspected.

Where to look:

    every load begins with       checkpoint_file
    fp.load                      unpickle; then other names (renaming), another dtype (conversion)
    fp.load_into                 fill_target → fill_tensors; a directory of files: safetensors_directory
    Checkpointer.load(into=)     restore → targets (what fits where) → target_plan
    keys=, in every load         selection
    fp.inspect, fp.verify        file_inspection, directory_inspection
    a step in parts              part_files
"""
