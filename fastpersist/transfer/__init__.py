"""The Python interface to csrc: writer and reader, engine selection, devices, the arena, tensor files.

Where to look:

    a file from end to end       writer, reader; background_read beside the caller's thread
    pages of a file, for long    page_writer
    any place of an open file    tensor_file, with tensor_requests for what callers give and wait for
    which engine moves bytes     engine_selection; gpudirect for the engine "cufile"
    where bytes come from        tensor_memory (host), cuda (devices), arena (copies of what is about to change)
    for all of them              progress, torch_boundary, garbage
"""
