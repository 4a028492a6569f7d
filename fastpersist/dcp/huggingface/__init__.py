"""Writes HuggingFace's safetensors files from shards, and reads them into shards.

Where to look:

    a save                       storage_writer → layout (what lies where) → model_part (this rank's chunks)
    tensors in many short runs   shared_windows: put together by the ranks of a machine, before they are written
    at the end                   coordinator: headers, with CRCs from crc_terms; captured_bytes in an asynchronous save
    a load                       storage_reader
"""
