"""File formats: encodes and parses containers, scans pickles. Pure: no I/O, no torch, hostile input expected.

Where to look:

    where bytes lie              byte_ranges; layout (every record of a file, from sizes alone)
    the files of tensors         torch_zip, safetensors, npy; foreign (what is none of them)
    the files beside them        manifest (MANIFEST.json), split_manifest (PARTS.json)
    a pickle, without its code   pickle_scan reads it into pickle_nodes; pickle_tensors finds the tensors in these, and
                                 pickle_values what else there is
    names of tensors             names: patterns and prefixes
"""
