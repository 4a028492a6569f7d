"""Tables whose rows are gathered from disk.

Where to look:

    where rows lie               opening: files and pieces of files → one table; sidecar (CRCs, packed ids)
    writing a table              writer; progress (what a killed one leaves to go on from)
    rewriting one                packing: rows that are asked for often come first
    proving one                  verification
    reading rows by ids          store; ids (what callers may give); ahead (rows for the batches of a loop)
    on a device, or on the way   device_rows
    in place of nn.Embedding     embedding
"""
