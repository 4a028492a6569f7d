"""Runs HuggingFace models that are larger than memory: their weights stay in their files.

    from fastpersist.integrations.huggingface_streaming import from_pretrained

    model = from_pretrained("dir", device_map="cpu", max_memory={"cpu": "4GiB"})
    model.generate(**inputs, max_new_tokens=32)

This is `fastpersist.stream` with transformers' handling of configuration, classes, names, ties and buffers. Nothing is
converted on the disk, and nothing is written.
"""

from .loading import from_pretrained

__all__ = ["from_pretrained"]
