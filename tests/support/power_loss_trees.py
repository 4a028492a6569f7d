"""Power loss over directories, replayed: what is recorded at the seams is done again as a power cut may leave it.

As in support/power_loss.py, a cut comes after any prefix of the recording; a data operation is safe once a sync of its
file came behind it, an operation on a name once a sync of the directory did that the name is in. What is not safe may
be on disk or not, whatever became of the others, and a write may be torn. Here directories are made, renamed, exchanged
and removed too: so each directory has two lists of names, one as the kernel knew it, and one as it is on disk.
"""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from support.directories import Refusing
from support.filesystems import Operation
from support.power_loss import DATA_OPERATIONS, Fate, RecordingFilesystem, apply

from fastpersist.commit.filesystem import Filesystem

EXHAUSTIVE_COUNT = 4
"""Of so many operations that are not safe, every combination is replayed; of more, a choice."""


class RecordingTrees(RecordingFilesystem):
    """Logs operations by the path that their file has at that moment; the engine's writes are to what was allocated."""

    @contextmanager
    def around(self, operation: Operation) -> Iterator[None]:
        self.take_writes()
        yield
        self.log.append(operation)

    def mark(self, name: str, number: int) -> None:
        """Note that a save was started, or has returned."""
        self.take_writes()
        self.log.append(Operation(name, "", size_bytes=number))

    def allocate(self, fd: int, size_bytes: int, path: str) -> None:
        super().allocate(fd, size_bytes, _path_of(fd))
        self._writing = _path_of(fd)

    def truncate(self, fd: int, size_bytes: int, path: str) -> None:
        super().truncate(fd, size_bytes, _path_of(fd))

    def sync(self, fd: int, path: str) -> None:
        super().sync(fd, _path_of(fd))

    def write(self, fd: int, data: bytes, path: str) -> None:
        offset_bytes = os.lseek(fd, 0, os.SEEK_CUR)
        with self.around(Operation("write", _path_of(fd), offset_bytes=offset_bytes, data=data)):
            Filesystem.write(self, fd, data, path)


class RecordingRefusing(Refusing, RecordingTrees):
    """The same where two names cannot change places."""


def _path_of(fd: int) -> str:
    return os.readlink(f"/proc/self/fd/{fd}")


@dataclass(eq=False)
class Node:
    """A file, or a directory with its names as the kernel knows them and as they are on disk."""

    content: bytearray | None = None  # None: a directory
    in_kernel: dict[str, Node] = field(default_factory=dict)
    on_disk: dict[str, Node] = field(default_factory=dict)

    def enter(self, name: str, node: Node, kept: bool) -> None:
        self.in_kernel[name] = node
        if kept:
            self.on_disk[name] = node

    def leave(self, name: str, kept: bool) -> None:
        self.in_kernel.pop(name, None)
        if kept:
            self.on_disk.pop(name, None)


Tree = dict[str, bytes | None]
"""What a disk holds: the bytes of each file, None for a directory, by path from the root."""


def read_tree(root: Path) -> Tree:
    return {
        str(path.relative_to(root)): None if path.is_dir() else path.read_bytes() for path in sorted(root.rglob("*"))
    }


def write_tree(tree: Tree, root: Path) -> None:
    root.mkdir(parents=True)
    for name in sorted(tree):
        content = tree[name]
        if content is None:
            (root / name).mkdir()
        else:
            (root / name).write_bytes(content)


class Disk:
    """Operations done again, each as its fate wants it.

    Args:
        before: The content of the disk before, all of it safe.
        root: The root of that content when the operations were recorded.
    """

    def __init__(self, before: Tree, root: str) -> None:
        self._prefix = root + "/"
        self._root = Node()
        for name in sorted(before):
            content = before[name]
            parent, last = self._place(self._prefix + name)
            parent.enter(last, Node(None if content is None else bytearray(content)), kept=True)

    def _place(self, path: str) -> tuple[Node, str]:
        """Return the directory that a path is in, as the kernel sees it, and its name there."""
        parts = path.removeprefix(self._prefix).split("/")
        node = self._root
        for part in parts[:-1]:
            node = node.in_kernel[part]
        return node, parts[-1]

    def directory_of(self, operation: Operation) -> Node:
        return self._place(operation.path)[0]

    def node_at(self, path: str) -> Node | None:
        if path + "/" == self._prefix:
            return self._root
        parent, name = self._place(path)
        return parent.in_kernel.get(name)

    def do(self, operation: Operation, fate: Fate, rng: random.Random) -> None:
        """Do an operation: the kernel's names always, the disk's as far as its fate lets it."""
        kept = fate is not Fate.DROPPED
        if operation.name in ("started", "returned", "sync", "sync_directory"):
            return
        parent, name = self._place(operation.path)
        if operation.name == "create":
            parent.enter(name, Node(bytearray()), kept)
        elif operation.name == "make_directory":
            parent.enter(name, Node(), kept)
        elif operation.name in ("unlink", "remove_directory"):
            parent.leave(name, kept)
        elif operation.name in ("rename", "rename_to_free_name"):
            target, target_name = self._place(operation.target)
            node = parent.in_kernel[name]
            parent.leave(name, kept)
            target.enter(target_name, node, kept)
        elif operation.name == "exchange":
            target, target_name = self._place(operation.target)
            first, second = parent.in_kernel[name], target.in_kernel[target_name]
            parent.enter(name, second, kept)
            target.enter(target_name, first, kept)
        elif operation.name in DATA_OPERATIONS:
            if name not in parent.in_kernel:  # opened beside the seam, as LATEST is
                parent.enter(name, Node(bytearray()), kept)
            content = parent.in_kernel[name].content
            if kept and content is not None:
                apply(operation, content, fate, rng)
        else:
            raise NotImplementedError(operation.name)

    def tree(self) -> Tree:
        found: Tree = {}

        def walk(node: Node, prefix: str) -> None:
            for name, below in node.on_disk.items():
                found[prefix + name] = None if below.content is None else bytes(below.content)
                walk(below, f"{prefix}{name}/")

        walk(self._root, "")
        return found


def unsafe_operations(before: Tree, root: str, log: Sequence[Operation]) -> list[int]:
    """Return the indexes of the operations that a power cut at the end of `log` may undo."""
    disk = Disk(before, root)
    unsafe: dict[int, tuple[str, Node]] = {}
    rng = random.Random(0)
    for index, operation in enumerate(log):
        if operation.name in ("sync", "sync_directory"):
            node = disk.node_at(operation.path)
            kind = "data" if operation.name == "sync" else "name"
            unsafe = {at: about for at, about in unsafe.items() if about != (kind, node)}
            continue
        disk_node = None
        if operation.name in DATA_OPERATIONS:
            disk.do(operation, Fate.KEPT, rng)
            disk_node = disk.node_at(operation.path)
            assert disk_node is not None
            unsafe[index] = ("data", disk_node)
        elif operation.name not in ("started", "returned"):
            unsafe[index] = ("name", disk.directory_of(operation))
            disk.do(operation, Fate.KEPT, rng)
    return sorted(unsafe)


def tree_after_cut(
    before: Tree, root: str, log: Sequence[Operation], fates: dict[int, Fate], rng: random.Random
) -> Tree:
    """Rebuild what `log` makes of `before`. `fates`, by index, are of what is not safe."""
    disk = Disk(before, root)
    for index, operation in enumerate(log):
        disk.do(operation, fates.get(index, Fate.KEPT), rng)
    return disk.tree()


def fates_to_try(
    log: Sequence[Operation], unsafe: Sequence[int], rng: random.Random, random_count: int
) -> Iterator[dict[int, Fate]]:
    """Yield combinations of fates of the operations that are not safe: all of them, or a choice of many."""
    choices = [list(Fate) if log[index].name == "write" else [Fate.KEPT, Fate.DROPPED] for index in unsafe]
    if len(unsafe) <= EXHAUSTIVE_COUNT:
        for chosen in itertools.product(*choices):
            yield dict(zip(unsafe, chosen, strict=True))
        return
    for usual, other in ((Fate.KEPT, Fate.DROPPED), (Fate.DROPPED, Fate.KEPT)):
        yield dict.fromkeys(unsafe, usual)
        for index in unsafe:
            yield {**dict.fromkeys(unsafe, usual), index: other}
    for _ in range(random_count):
        yield {index: rng.choice(choice) for index, choice in zip(unsafe, choices, strict=True)}
