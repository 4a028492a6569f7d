"""torch.distributed.checkpoint with our files: a storage writer, a storage reader, and a planner that shares the work.

    dcp.save(state, storage_writer=FastPersistWriter("ckpt"), planner=FastPersistSavePlanner())
    dcp.load(state, storage_reader=FastPersistReader("ckpt"))

A checkpoint is a directory with one part file of each rank, DCP's `.metadata` and our manifest, published as a whole.
DCP's FileSystemReader reads ours, FastPersistReader those of DCP's FileSystemWriter.
"""

from fastpersist.sharded.planning import FastPersistSavePlanner
from fastpersist.sharded.reader import FastPersistReader
from fastpersist.sharded.writer import FastPersistWriter

__all__ = ["FastPersistReader", "FastPersistSavePlanner", "FastPersistWriter"]
