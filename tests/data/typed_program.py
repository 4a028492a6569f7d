"""A user's program that uses every public name, checked by tests/programs/test_types.py, and never run.

It says the types that a user relies on; a type checker in its strictest mode must find nothing in it.
"""

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.distributed import ProcessGroup
from typing_extensions import assert_type

import fastpersist as fp


def files(path: Path, model: torch.nn.Module) -> None:
    report = fp.save({"model": model.state_dict()}, path, durable=True, checksum=True, engine=fp.require_engine("auto"))
    assert_type(report, fp.SaveReport)
    assert_type((report.size_bytes, report.engine, report.total_s), tuple[int, str, float])
    with open(path, "wb") as file:
        fp.save(model.state_dict(), file)
    assert_type(fp.load(path, map_location="cpu", keys=["model.*"], dtype=torch.float16), Any)
    fp.load_into(path, model, strict=False)
    pending = fp.save_async(model.state_dict(), str(path), gate="manual")
    assert_type(pending, fp.PendingSave)
    pending.wait_captured(timeout=1.0)
    assert_type((pending.captured(), pending.done(), pending.skipped()), tuple[bool, bool, bool])
    assert_type(pending.result(), Path)
    assert_type(pending.exception(), BaseException | None)
    found = fp.inspect(path)
    assert_type(found, fp.Manifest)
    assert_type(found.tensors, tuple[fp.TensorEntry, ...])
    assert_type([(one.name, one.shape) for one in found.tensors], list[tuple[str, tuple[int, ...]]])
    assert_type(found.metrics, dict[str, float])
    verified = fp.verify(path, progress=True)
    assert_type(verified, fp.VerifyReport)
    assert_type(verified.damages, tuple[fp.Damage, ...])
    assert_type(verified.ok, bool)


def directories(path: Path, optimizer: torch.optim.Optimizer, group: ProcessGroup) -> None:
    fp.require_replaceable(str(path), lambda name: name.endswith(".bin"))
    directory = fp.DirectorySave(path, overwrite=True)
    directory.save(optimizer.state_dict(), "optimizer.pt", optimizer)
    directory.add_bytes("config.json", b"{}")
    assert_type(directory.publish(step=3, metrics={"loss": 0.5}), fp.PendingSave)
    together = fp.directory_save_together(path, group, writers="node")
    assert_type(together, fp.DirectorySave | fp.PeerDirectorySave)
    assert_type(together.path, str)


def training(root: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer, group: ProcessGroup) -> None:
    def make_state() -> tuple[int, dict[str, Any]]:
        return 7, model.state_dict()

    def merged(rank_states: list[Any], rank: int, count: int) -> object:
        return rank_states[rank % count]

    with fp.Checkpointer(
        root, optimizer=optimizer, constant=[model], keep=3, keep_best=(2, "loss", "min"), busy="latest"
    ) as checkpoints:
        assert_type(checkpoints, fp.Checkpointer)
        resumed = checkpoints.load(into={"model": model}, missing_ok=True, on_resize=merged)
        assert_type(resumed, Any)
        checkpoints.load("best", keys=["ema"])
        checkpoints.save_on_signal(make_state, [signal.SIGTERM], grace_s=20)
        pending = checkpoints.save(1, {"model": model.state_dict()}, rank_state={"seed": 1}, metrics={"loss": 0.1})
        assert_type(pending.stats, fp.SaveStats)
        checkpoints.wait_captured()
        checkpoints.poll()
        checkpoints.wait(timeout=60)
        assert_type(checkpoints.stats(), list[fp.SaveStats])
        assert_type([(one.step, one.stall_s) for one in checkpoints.stats()], list[tuple[int | None, float]])
        assert_type(checkpoints.explain({}), str)
        assert_type(
            (checkpoints.steps(), checkpoints.latest(), checkpoints.best()), tuple[list[int], int | None, int | None]
        )
        assert_type(checkpoints.discard_after(5), list[int])
        checkpoints.delete(1)
        checkpoints.rebind(group)
        checkpoints.close(abort=True)


def replaced() -> None:
    fp.install(async_=True)
    fp.uninstall()
    with fp.installed(durable=False):
        torch.save({}, "model.pt")


def tensor_files(path: Path) -> None:
    tensor = fp.locked_tensor((4, 1024), torch.float32)
    assert_type(fp.byte_view(tensor), torch.Tensor)
    with fp.TensorFile(path, "w+", queue_depth=8) as file:
        assert_type(file, fp.TensorFile)
        assert_type(file.write(tensor), int)
        request = file.read_async(tensor, 4096)
        assert_type(request, fp.PendingIO)
        assert_type(request.result(), int)
        file.read_list([(tensor, 0)])
    probes = fp.engines(path)
    assert_type(probes, list[fp.EngineProbe])
    assert_type([(one.name, one.usable, one.why_not) for one in probes], list[tuple[str, bool, str]])


def streams(model: torch.nn.Module, path: Path) -> None:
    with fp.stream(model, path, budget_bytes="auto", dtype=torch.bfloat16) as weights:
        assert_type(weights, fp.WeightStream)
        stats = weights.stats()
        assert_type(stats, fp.StreamStats)
        assert_type(stats.stall_s, float)


def rows(path: Path, ids: torch.Tensor, batches: Iterator[torch.Tensor]) -> None:
    with fp.RowWriter(path, (16,), torch.float16) as writer:
        assert_type(writer, fp.RowWriter)
        writer.append(torch.zeros(4, 16))
    fp.write_rows(path, torch.zeros(4, 16), overwrite=True)
    assert_type(fp.pack_rows(path, "packed.npy", order=ids), fp.PackReport)
    assert_type(fp.verify_rows(path), fp.VerifyReport)
    with fp.RowStore(path, cache_bytes=1 << 20) as store:
        assert_type(store, fp.RowStore)
        assert_type(store.gather(ids), torch.Tensor)
        assert_type(store.gather_unique(ids), tuple[torch.Tensor, torch.Tensor])
        ticket = store.prefetch(ids)
        assert_type(ticket, fp.RowTicket)
        assert_type(ticket.result(), torch.Tensor)
        for batch, gathered in store.ahead(batches, ids=lambda one: one + 1):
            assert_type((batch, gathered), tuple[torch.Tensor, torch.Tensor])
        assert_type(store.stats(), fp.RowStats)
        assert_type(store.stats().hit_rate, float)
        embedding = fp.RowEmbedding(store)
        assert_type(embedding, fp.RowEmbedding)


def errors(path: Path) -> str:
    try:
        fp.load(path)
    except fp.CheckpointNotFoundError:
        return "no checkpoint"
    except fp.EndOfFileError as error:
        assert_type((error.done_bytes, error.asked_bytes), tuple[int, int])
    except fp.NoSpaceError:
        return "no space"
    except fp.StorageError as error:
        assert_type(error.errno, int | None)
        assert_type(error.offset_bytes, int | None)
    except (fp.FormatError, fp.ChecksumError) as error:
        assert_type(error.message, str)
        assert_type(error.path, str | None)
    except (fp.AgreementTimeoutError, fp.PeerError) as error:
        assert_type(error.rank, int)
    except (fp.RowIndexError, fp.UnsavableTensorError, fp.ConfigError, fp.UnsupportedError, fp.DeviceError):
        return "wrong use"
    except (fp.TornStateError, fp.SkippedError, fp.CoordinationError, fp.CorruptionError, fp.InternalError):
        return "failed"
    except fp.FastPersistError as error:
        return str(error)
    return ""
