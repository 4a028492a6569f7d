"""Object to file: the skeleton, containers, ownership, capture, and the background queue.

A save goes through these in turn:

    what begins it               file_save (one file: fp.save, fp.save_async), directory_save (a Checkpointer's step)
    object → skeleton            skeleton; refused_globals warns of what loads will refuse
    who may change what when     ownership → capture → pacing
    object → planned file        containers; sources has the columns that all of these share
    planned file → disk          write_file; directory_files for those of a directory
    meanwhile                    pending_save: the thread, the state of the save, its error
"""
