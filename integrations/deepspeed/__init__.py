"""DeepSpeed's save_checkpoint and load_checkpoint, with the disk beside the training.

    from fastpersist.integrations.deepspeed import attach

    engine, _, _, _ = deepspeed.initialize(model=model, config=config)
    saving = attach(engine)                    # from here on engine.save_checkpoint is ours
    …
    saving.close()                             # at the end: wait for the last one

What is in a checkpoint, and how its files are called, is DeepSpeed's affair: its own save_checkpoint is called, with a
checkpoint engine of ours (`checkpoint_engine`), and the files that it saves go into one `DirectorySave` of all ranks.
So stock DeepSpeed, zero_to_fp32.py and ds_to_universal.py read what is written here, and this reads what they wrote.
New is that training goes on meanwhile, that a tag is visible only when the files of all ranks are durable, and that
`latest` names it only then. What all data-parallel ranks hold alike, all of them write, each a part; ZeRO's partitions
are written by the rank that has them, while the other ranks write theirs. What may be written from where it is:
`engine_tensors`.
"""

from .attachment import Attachment, attach

__all__ = ["Attachment", "attach"]
