"""HuggingFace models that are larger than memory: their weights stay in the files that they were loaded from.

    from fastpersist.integrations.huggingface_streaming import from_pretrained

    model = from_pretrained("dir", device_map="cpu", max_memory={"cpu": "4GiB"})
    model.generate(**inputs, max_new_tokens=32)

This is `fastpersist.stream` with what transformers does between a file and a model: configuration, classes, names,
ties, buffers. Nothing is converted on the disk, and nothing is written.
"""

from .loading import from_pretrained

__all__ = ["from_pretrained"]
