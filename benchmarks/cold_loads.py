"""Loads of files that are not in the page cache, beside fio and bare reads, each in a process of its own.

    .venv/bin/python benchmarks/cold_loads.py DIR [--state gpt2-124m] [--repeat 7] [--against TREE] [--json FILE]

The first load of a process counts: with its ring to map, as at the start of a training. Rows are in turn. With
`--against`, each of ours runs in turn from another source tree, which has its native module beside it. fio's buffers
are on huge pages (`--iomem=mmaphuge`) where the machine has them reserved: `sysctl vm.nr_hugepages=48`. The bare reads
are of 8 MiB, 8 in flight, into memory of the file's size on huge pages: touched before; touched before, while another
thread makes the kernel clear as much fresh memory; or fresh. They are what no load can beat.

The host of a virtual machine takes memory back that has been free for some seconds, and finding it again can take
longer than the load. So each process touches and frees as much memory as the file has, right before it loads.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import harness  # first: it says what to do without an installed fastpersist
import torch

import fastpersist as fp
from fastpersist import _native
from fastpersist.cli.bench.fio import FioJob, has_huge_pages, run_fio
from fastpersist.cli.bench.load_rows import PageCache
from fastpersist.cli.bench.states import STATE_NAMES, StateRecipe, flatten
from fastpersist.cli.child_process import Answers, ChildProcess

_BLOCK_BYTES = 8 << 20
_HUGE_BYTES = 2 << 20
_MADV_POPULATE_WRITE = 23


def main() -> int:
    """Measure, and print a line for each row."""
    parser = harness.argument_parser("cold_loads.py", __doc__)
    parser.add_argument("--state", choices=STATE_NAMES, default="gpt2-124m")
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--against", metavar="TREE", help="another source tree, whose rows are called 'before'")
    parser.add_argument("--rows", nargs="+", metavar="NAME", help="only these")
    options = parser.parse_args()
    root = tempfile.mkdtemp(prefix="cold-", dir=options.directory)
    try:
        found = measure(root, options)
    finally:
        shutil.rmtree(root)
    best = min(found["fio"])
    for name, seconds in found.items():
        median = statistics.median(seconds)
        spread = f"{min(seconds):.3f} – {max(seconds):.3f}"
        print(f"{name:34} {median:.3f} s ({spread})  {statistics.median(found['fio']) / median:4.0%} of fio, "
              f"{best / median:4.0%} of its best")  # fmt: skip
    if options.json:
        Path(options.json).write_text(json.dumps({"torch": torch.__version__, "seconds": found}, indent=1))
    return 0


def measure(root: str, options: Any) -> dict[str, list[float]]:
    """Return the seconds of each row, per bytes of the largest file."""
    trees = {"": ""} | ({", before": options.against} if options.against else {})
    with ExitStack() as stack:
        processes = {
            suffix: stack.enter_context(
                ChildProcess(
                    (f"sys.path.insert(0, {tree!r}); " if tree else "") + "import cold_loads; cold_loads.serve()",
                    options.state,
                    root,
                    title=f"the process of {tree or 'this tree'}",
                )
            )
            for suffix, tree in trees.items()
        }
        ways = {name: (name, "") for name in _BARE} | {
            name + suffix: (name, suffix) for name in _FILES if name not in _BARE for suffix in trees
        }
        if options.rows:
            ways = {shown: way for shown, way in ways.items() if way[0] in options.rows}
        processes[""].send({"row": "write"})
        sizes = processes[""].receive()
        cache = PageCache(warm=False, whole_machine=False)
        found: dict[str, list[float]] = {"fio": [], **{name: [] for name in ways}}
        for turn in range(options.repeat):
            path = os.path.join(root, "tree.pt")
            cache.prepare(path)
            size_bytes = os.path.getsize(path) // _BLOCK_BYTES * _BLOCK_BYTES
            fio_s = run_fio(FioJob("read", size_bytes, huge_pages=has_huge_pages()), [path]).seconds
            found["fio"].append(fio_s * sizes["tree.pt"] / size_bytes)
            for shown, (name, suffix) in list(ways.items())[:: -1 if turn % 2 else 1]:
                path = os.path.join(root, _FILES[name])
                cache.prepare(path)
                processes[suffix].send({"row": name})
                seconds = processes[suffix].receive()["seconds"]
                found[shown].append(seconds * sizes["tree.pt"] / sizes[_FILES[name]])
    print(f"{sizes['tree.pt']} bytes; {cache.describe()}; fio on huge pages: {has_huge_pages()}")
    return found


# ------------------------------------------------------------------------------------------------------------ rows


_FILES = {
    "bare, touched": "tree.pt",
    "bare, touched, another clears": "tree.pt",
    "bare, fresh": "tree.pt",
    "fp.load": "tree.pt",
    "fp.load .safetensors": "tree.safetensors",
    "load_into a tree": "tree.pt",
    "load_into a tree, .safetensors": "tree.safetensors",
    "load_into model, used optimizer": "model.pt",
    "load_into model, new optimizer": "model.pt",
}
_BARE = [name for name in _FILES if name.startswith("bare")]


def serve() -> None:
    """Run rows, each in a fork, until the parent closes its end."""
    state, root = sys.argv[1:]
    torch.set_num_threads(1)  # a forked child cannot use OpenMP where its parent has
    answers = Answers()
    for request in answers.requests():

        def work(name: str = request["row"]) -> dict[str, Any]:
            if name == "write":
                return write_files(StateRecipe(state), root)
            path = os.path.join(root, _FILES[name])
            load = prepared(name, StateRecipe(state), path)
            size_bytes = os.path.getsize(path)
            populate(*fresh_memory(size_bytes), size_bytes)
            started_s = time.perf_counter()
            kept = load()  # freeing it takes time, too
            return {"seconds": time.perf_counter() - started_s, "kept": bool(kept)}

        answers.send_from_fork(work, "the process that ran it died")


def write_files(recipe: StateRecipe, root: str) -> dict[str, Any]:
    """Write the files, and return their sizes by name."""
    tree = recipe.build().tree
    fp.save(tree, os.path.join(root, "tree.pt"))
    fp.save(flatten(tree), os.path.join(root, "tree.safetensors"))
    trained = new_training(tree, steps=1)
    fp.save({name: one.state_dict() for name, one in trained.items()}, os.path.join(root, "model.pt"))
    return {name: os.path.getsize(os.path.join(root, name)) for name in sorted(set(_FILES.values()))}


def new_training(tree: dict[str, Any], *, steps: int) -> dict[str, Any]:
    """Return a model and an AdamW with parameters of the shapes of a state's model, after some steps."""
    model = torch.nn.Module()
    for name, tensor in tree.get("model", tree).items():
        model.register_parameter(name.replace(".", "_"), torch.nn.Parameter(torch.ones(tensor.shape)))
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    for _ in range(steps):
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    return {"model": model, "optimizer": optimizer}


def prepared(name: str, recipe: StateRecipe, path: str) -> Callable[[], object]:
    """Return a load, with all targets made."""
    if name.startswith("bare"):
        return bare_read(name, path)
    if name.startswith("fp.load"):
        return lambda: fp.load(path)
    target = recipe.build(random_numbers=False).tree
    if name.startswith("load_into model"):
        target = new_training(target, steps=0 if "new" in name else 1)
    elif name.endswith(".safetensors"):
        target = flatten(target)
    return lambda: fp.load_into(path, target)


def bare_read(name: str, path: str) -> Callable[[], object]:
    """Return a read of a file in blocks, straight into memory of its size."""
    size_bytes = os.path.getsize(path) // _BLOCK_BYTES * _BLOCK_BYTES
    memory, start = fresh_memory(size_bytes)
    if "touched" in name:
        populate(memory, start, size_bytes)
    requests = [(False, offset, start + offset, _BLOCK_BYTES) for offset in range(0, size_bytes, _BLOCK_BYTES)]
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def read() -> object:
        clearing = threading.Thread(target=populate, args=(*fresh_memory(size_bytes), size_bytes))
        if "clears" in name:
            clearing.start()
        _native.run_requests(descriptor, os.fsencode(path), ["uring"], requests, queue_depth=8)
        return memory

    return read


def fresh_memory(size_bytes: int) -> tuple[mmap.mmap, int]:
    """Map memory on huge pages; return it and its first address that is on one."""
    memory = mmap.mmap(-1, size_bytes + _HUGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    return memory, -(-address // _HUGE_BYTES) * _HUGE_BYTES


def populate(_memory: mmap.mmap, start: int, size_bytes: int) -> None:
    """Make the kernel find all pages of mapped memory, which stays mapped meanwhile."""
    libc = ctypes.CDLL(None)
    for at in range(0, size_bytes, 2 * _HUGE_BYTES):
        libc.madvise(ctypes.c_void_p(start + at), ctypes.c_size_t(2 * _HUGE_BYTES), _MADV_POPULATE_WRITE)


if __name__ == "__main__":
    harness.run_benchmark(main)
