"""torch.distributed.checkpoint (DCP) with FastPersist: storage writers, storage readers, and a save planner.

    dcp.save(state, storage_writer=FastPersistWriter("ckpt"), planner=FastPersistSavePlanner())
    dcp.load(state, storage_reader=FastPersistReader("ckpt"))

A checkpoint is a directory with one part file of each rank, DCP's `.metadata` and our manifest, published as a whole.
DCP's FileSystemReader reads it; FastPersistReader reads the checkpoints of DCP's FileSystemWriter. The planner works
with any storage writer: ranks that hold the same large tensor each write a part of it. It refuses two tensors under one
name.

    dcp.save(model.state_dict(), storage_writer=FastPersistHuggingFaceWriter("out"), planner=FastPersistSavePlanner())
    dcp.load(state, storage_reader=FastPersistHuggingFaceReader("out"))

These write and read the format of HuggingFace's save_pretrained and from_pretrained: safetensors with whole tensors.

    save_sharded(files, state, "weights", optimizer)

This saves a DCP checkpoint among the other files of a DirectorySave, in the background; SharedPlans reuses the plan.
"""

from fastpersist.dcp.huggingface.storage_reader import FastPersistHuggingFaceReader
from fastpersist.dcp.huggingface.storage_writer import FastPersistHuggingFaceWriter
from fastpersist.dcp.plan_agreement import SharedPlans
from fastpersist.dcp.save_planner import FastPersistSavePlanner
from fastpersist.dcp.save_state import save_sharded
from fastpersist.dcp.storage_reader import FastPersistReader
from fastpersist.dcp.storage_writer import FastPersistWriter

__all__ = [
    "FastPersistHuggingFaceReader",
    "FastPersistHuggingFaceWriter",
    "FastPersistReader",
    "FastPersistSavePlanner",
    "FastPersistWriter",
    "SharedPlans",
    "save_sharded",
]
