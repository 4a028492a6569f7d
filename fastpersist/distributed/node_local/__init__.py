"""Ranks that share no file system: found out, saved in parts or as copies, published in each store, loaded again.

Where to look:

    a save                       detection (who sees whose files), copies (whole files in place of parts), then
                                 publishing (every store, the coordinator's last)
    a load                       split_step (what the ranks see of a step) → exchange (each reads what it sees, for all)
"""
