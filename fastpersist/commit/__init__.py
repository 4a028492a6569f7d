"""The commit protocol: files and directories become durable, then visible. Locks, removal, the listing of steps.

Where to look:

    becoming visible             file_commit, directory_commit, permissions (those of what is replaced)
    being there, and going       step_listing (which steps, in which order), locks (who reads or writes), removal,
                                 freeing (the space of files that were replaced)
    below all of them            filesystem, the one seam to the kernel

docs/explanation/commit.md has the protocol, and what is left when a process dies between any two of its steps.
"""
