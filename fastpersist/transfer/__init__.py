"""The Python face of csrc: writer and reader, engine selection, devices, the arena, tensor files."""
