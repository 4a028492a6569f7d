"""torch.distributed.checkpoint with our files: storage writers, storage readers, and a planner that shares the work.

    dcp.save(state, storage_writer=FastPersistWriter("ckpt"), planner=FastPersistSavePlanner())
    dcp.load(state, storage_reader=FastPersistReader("ckpt"))

A checkpoint is a directory with one part file of each rank, DCP's `.metadata` and our manifest, published as a whole.
DCP's FileSystemReader reads ours, FastPersistReader those of DCP's FileSystemWriter. The planner works with any storage
writer; it has all that hold a large tensor write a part of it, and refuses two tensors under one name.

    dcp.save(model.state_dict(), storage_writer=FastPersistHuggingFaceWriter("out"), planner=FastPersistSavePlanner())
    dcp.load(state, storage_reader=FastPersistHuggingFaceReader("out"))

Here it is what HuggingFace's save_pretrained writes and from_pretrained reads: safetensors files with whole tensors.

    save_sharded(files, state, "weights", optimizer)

A checkpoint among the other files of a DirectorySave, behind the training; SharedPlans spares planning each time anew.
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
