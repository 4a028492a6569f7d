"""Sharded state, saved on n ranks and loaded on m, in the files of torch.distributed.checkpoint (DCP).

A checkpoint is a directory with a part file of each rank, DCP's `.metadata` (what is where), and our manifest.
This folder is imported only by what needs it: torch.distributed.checkpoint takes a while to import.
"""
