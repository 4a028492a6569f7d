"""HuggingFace's safetensors files, written from shards and read into shards."""
