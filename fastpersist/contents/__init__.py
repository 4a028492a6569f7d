"""Inspects and converts the contents of saved files without loading them: streamed in pieces, in bounded memory.

Where to look:

    stored          the tensors of a file or a step by name, and where the bytes of each lie
    sharded         rows of tensors in the shards of a torch.distributed.checkpoint
    pieces          their bytes, piece by piece, at the speed of the disk
    statistics      smallest, largest, mean, norm, NaN and infinities of each tensor
    comparison      two sources: structure first, then bits
    conversion      one source into a file of another format, dtype or naming
"""
