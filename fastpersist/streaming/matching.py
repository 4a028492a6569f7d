"""Matches the tensors of a model with those of a source; checks every name, shape and dtype before a read.

Nothing changes in the model before `put_in_place` gives it parameters with memory for those on the meta device; ties
stay ties.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from fastpersist.errors import ConfigError, UnsupportedError
from fastpersist.streaming.source import Place, WeightSource
from fastpersist.streaming.units import Weight, WeightOwner

__all__ = ["Names", "match", "put_in_place"]

Names = Mapping[str, "str | Sequence[str]"]
"""Names of the model → names in the source: of one tensor, or of several whose bytes, end to end, are the tensor."""

_CONVERTED = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})
_SHOWN_COUNT = 20


@dataclass(eq=False, slots=True)
class _Tensor:
    """A tensor of the model, with every place that it has there."""

    tensor: torch.Tensor
    is_buffer: bool
    names: list[str] = field(default_factory=list)
    places: list[tuple[torch.nn.Module, str]] = field(default_factory=list)  # module, name in it
    is_persistent: bool = True


def match(
    model: torch.nn.Module,
    source: WeightSource,
    owner: WeightOwner,
    *,
    prefix: str,
    names: Names,
    dtype: torch.dtype | str | None,
    device: torch.device,
) -> list[Weight]:
    """Return the weights of a model, in the order of registration, each with its place in the source.

    Nothing changes in the model.

    Raises:
        ConfigError: The model and the source do not fit; the message lists what is wrong.
        UnsupportedError: A parameter is of a class that has its values elsewhere, or each use changes it.
    """
    problems = list(source.problems)
    found: list[tuple[_Tensor, tuple[Place, ...], torch.dtype]] = []
    tensors = _tensors_of(model)
    known = {name for each in tensors for name in each.names}
    problems += [f"names has {name}, which the model does not have" for name in names if name not in known]
    for each in tensors:
        _refuse_kind(each)
        if not each.is_persistent:
            if each.tensor.is_meta:
                problems.append(
                    f"the buffer {each.names[0]} is on the meta device, and no file has it: build the model so that "
                    "buffers are computed (accelerate.init_empty_weights(include_buffers=False) does)"
                )
            continue
        pieces = _pieces_of(each, source, prefix, names, problems)
        if pieces:
            target = _target_dtype(each, pieces, dtype, problems)
            if target is not None:
                found.append((each, pieces, target))
    if problems:
        shown = problems[:_SHOWN_COUNT]
        more = [f"and {len(problems) - len(shown)} more"] if len(problems) > len(shown) else []
        raise ConfigError(f"{source.path} does not fit the model: " + "; ".join(shown + more))
    return [_weight_of(*one, owner, device) for one in found]


def _tensors_of(model: torch.nn.Module) -> list[_Tensor]:
    found: dict[int, _Tensor] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        if hasattr(module, "_hf_hook"):
            raise ConfigError(
                f"{prefix or 'the model'} has hooks of accelerate (device_map, cpu_offload, …), which move its "
                "weights, too: build the model without them"
            )
        if isinstance(module, torch.nn.Embedding) and module.max_norm is not None:
            raise UnsupportedError(f"{prefix} has max_norm, so each use changes its weight, which stays on disk")
        for registry, is_buffer in ((module._parameters, False), (module._buffers, True)):
            for local, tensor in registry.items():
                if tensor is None:
                    continue
                each = found.setdefault(id(tensor), _Tensor(tensor, is_buffer))
                each.names.append(f"{prefix}.{local}" if prefix else local)
                each.places.append((module, local))
                each.is_persistent = not is_buffer or local not in module._non_persistent_buffers_set
    return list(found.values())


def _refuse_kind(each: _Tensor) -> None:
    of_stream = getattr(each.tensor, "_weight", None)
    if isinstance(of_stream, Weight):
        if not of_stream.owner.closed:
            raise ConfigError("the weights of this model are streamed already; close that stream first")
        return
    if type(each.tensor) not in (torch.Tensor, torch.nn.Parameter):
        raise UnsupportedError(
            f"{each.names[0]} is a {type(each.tensor).__name__}, which holds its values in other tensors (quantized "
            "after loading, or sharded): stream the model before it is changed, or load it whole"
        )


def _pieces_of(
    each: _Tensor, source: WeightSource, prefix: str, names: Names, problems: list[str]
) -> tuple[Place, ...]:
    """Return where a tensor lies in the source; empty, with a problem noted, if it does not."""
    wanted: list[str] = []
    for name in each.names:
        given = names.get(name, prefix + name)
        wanted = [given] if isinstance(given, str) else list(given)
        pieces = tuple(source.places[one] for one in wanted if one in source.places)
        if wanted and len(pieces) == len(wanted):
            break
    else:
        missing = next((one for one in wanted if one not in source.places), prefix + each.names[0])
        what = "buffer" if each.is_buffer else "parameter"
        why = source.unusable.get(missing, "there is no such tensor")
        named = f" ({missing})" if missing != each.names[0] else ""
        problems.append(f"{what} {each.names[0]}{named}: {why}")
        return ()
    if len(pieces) == 1 and pieces[0].shape != tuple(each.tensor.shape):
        problems.append(f"{each.names[0]} has shape {list(each.tensor.shape)}, in the source {list(pieces[0].shape)}")
        return ()
    if len({piece.dtype for piece in pieces}) > 1:
        problems.append(f"the pieces of {each.names[0]} have different dtypes in the source")
        return ()
    count = sum(piece.size_bytes // piece.dtype.itemsize for piece in pieces)
    if count != each.tensor.numel():
        problems.append(f"{each.names[0]} has {each.tensor.numel()} elements, its pieces in the source {count}")
        return ()
    return pieces


def _target_dtype(
    each: _Tensor, pieces: tuple[Place, ...], dtype: torch.dtype | str | None, problems: list[str]
) -> torch.dtype | None:
    """Return the dtype that a weight will have; None, with a problem noted, if there is none."""
    in_file = pieces[0].dtype
    if dtype == "auto" or (in_file == each.tensor.dtype and not isinstance(dtype, torch.dtype)):
        return in_file
    if isinstance(dtype, torch.dtype) and in_file in _CONVERTED and each.tensor.dtype.is_floating_point:
        return dtype
    if dtype == "model" and in_file in _CONVERTED and each.tensor.dtype in _CONVERTED:
        return each.tensor.dtype
    if in_file == each.tensor.dtype:
        return in_file
    problems.append(
        f"{each.names[0]} is {each.tensor.dtype}, in the source {in_file}: pass dtype='auto' for the source's, or a "
        "dtype to convert to"
    )
    return None


def _weight_of(
    each: _Tensor, pieces: tuple[Place, ...], dtype: torch.dtype, owner: WeightOwner, device: torch.device
) -> Weight:
    tensor = found = each.tensor
    shape = tuple(tensor.shape)
    with torch.inference_mode(False), torch.no_grad():
        fill = float("nan") if dtype.is_floating_point and dtype.itemsize > 1 else 0
        stand_in = torch.full((), fill, dtype=dtype, device=device).expand(shape)
        if tensor.is_meta or tensor.is_inference():  # the memory of an inference tensor cannot be replaced
            tensor = stand_in.detach() if each.is_buffer else torch.nn.Parameter(stand_in, requires_grad=False)
            tensor.__dict__.update(found.__dict__)
    bound_class = torch.Tensor if each.is_buffer else torch.nn.Parameter
    return Weight(each.names[0], tensor, found, each.places, bound_class, stand_in, shape, dtype, pieces, owner)


def put_in_place(weights: Iterable[Weight]) -> None:
    """Put the tensors of weights into the model, where others were found, and let none of them want a gradient."""
    for weight in weights:
        if weight.tensor is not weight.found:
            for module, local in weight.places:
                setattr(module, local, weight.tensor)  # recurrent modules note it in lists of their own, too
        elif weight.tensor.requires_grad:
            weight.tensor.requires_grad_(False)
