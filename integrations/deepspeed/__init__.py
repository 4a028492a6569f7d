"""DeepSpeed's save_checkpoint and load_checkpoint, with writing in the background.

    from fastpersist.integrations.deepspeed import attach

    engine, _, _, _ = deepspeed.initialize(model=model, config=config)
    saving = attach(engine)                    # from here on engine.save_checkpoint is ours
    …
    saving.close()                             # at the end: wait for the last save

DeepSpeed decides the contents and file names of a checkpoint: we call its save_checkpoint with our checkpoint engine
(`checkpoint_engine`), which redirects the files into one `DirectorySave` of all ranks. So stock DeepSpeed,
zero_to_fp32.py and ds_to_universal.py read our checkpoints, and we read theirs. FastPersist adds: training goes on
during the write, a tag becomes visible only when the files of all ranks are durable, and only then does `latest` name
it. Data-parallel ranks each write a part of replicated state; each rank writes its own ZeRO partition. `engine_tensors`
finds the tensors that are written in place.
"""

from .attachment import Attachment, attach

__all__ = ["Attachment", "attach"]
