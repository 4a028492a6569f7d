"""The files of torch.distributed.checkpoint, and HuggingFace's made from shards."""
