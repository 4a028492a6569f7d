"""Ranks that share no file system: detection, saving in parts or as copies, publishing in each store, loading.

Where to look:

    a save                       detection (who sees whose files), copies (whole files in place of parts), then
                                 publishing (every store, the coordinator's last)
    a load                       split_step (what the ranks see of a step) → exchange (each reads what it sees, for all)
"""
