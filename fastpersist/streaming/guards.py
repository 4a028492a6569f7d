"""Guards on a streamed model: it refuses other values, moves and copies, and its state_dict has no values.

`binding` has the guards of single weights.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any, NoReturn, TypeAlias

import torch

from fastpersist.errors import ConfigError
from fastpersist.streaming.binding import list_only
from fastpersist.streaming.units import Weight
from fastpersist.transfer.torch_boundary import untraced

__all__ = ["put_guards", "take_guards_away"]


_Kind: TypeAlias = tuple[torch.dtype, torch.device, int]
"""The properties on which a move or a conversion may depend: dtype, device, number of dimensions."""


def put_guards(
    model: torch.nn.Module, weights: Sequence[Weight], source_path: str
) -> list[torch.utils.hooks.RemovableHandle]:
    """Put guards on all modules of a model; return the handles of those that are hooks.

    Args:
        model: The root module.
        weights: The weights of the model that stay in the source.
        source_path: The path of the source, for messages.
    """
    streamed = {(id(module), local) for weight in weights for module, local in weight.places}
    streamed_ids = {id(weight.tensor) for weight in weights}
    kinds: dict[int, set[_Kind]] = defaultdict(set)  # by module
    for weight in weights:
        for module, _ in weight.places:
            kinds[id(module)].add((weight.dtype, weight.stand_in.device, len(weight.shape)))

    @untraced
    def list_weights(module: torch.nn.Module, state: dict[str, Any], *arguments: object) -> None:
        list_only(state)

    @untraced
    def refuse_load(module: torch.nn.Module, state: dict[str, Any], prefix: str, *arguments: object) -> None:
        for inside, each in module.named_modules(prefix=prefix.removesuffix("."), remove_duplicate=False):
            for local in (*each._parameters, *each._buffers):
                name = f"{inside}.{local}" if inside else local
                if (id(each), local) in streamed and name in state:
                    raise ConfigError(
                        f"load_state_dict() would change {name}, whose values stay in {source_path} "
                        "(fastpersist.stream): close the stream first, and pass assign=True; or leave it out"
                    )

    def apply_to_others(
        module: torch.nn.Module, change: Callable[[torch.Tensor], torch.Tensor], *arguments: Any, **options: Any
    ) -> torch.nn.Module:
        below = {kind for each in module.modules() for kind in kinds.get(id(each), ())}
        if below and not _leaves_alone(change, below):
            raise ConfigError(
                "a model whose weights are streamed cannot be moved or converted: close the stream, and pass device= "
                "or dtype= to a new one"
            )

        def change_others(tensor: torch.Tensor) -> torch.Tensor:
            return tensor if id(tensor) in streamed_ids else change(tensor)

        type(module)._apply(module, change_others, *arguments, **options)
        return module

    def refuse_copy(*arguments: object) -> NoReturn:
        raise ConfigError(
            "a model whose weights are streamed cannot be copied or pickled: its weights are in "
            f"{source_path}; build and stream another one"
        )

    handles = []
    for module in model.modules():
        handles.append(module.register_load_state_dict_pre_hook(refuse_load))
        if any((id(module), local) in streamed for local in (*module._parameters, *module._buffers)):
            handles.append(module.register_state_dict_post_hook(list_weights))
        module.__dict__.update(
            _apply=partial(apply_to_others, module), __deepcopy__=refuse_copy, __reduce_ex__=refuse_copy
        )
    return handles


def take_guards_away(model: torch.nn.Module) -> None:
    """Remove the guards that are no hooks."""
    for module in model.modules():
        for name in ("_apply", "__deepcopy__", "__reduce_ex__"):
            module.__dict__.pop(name, None)


def _leaves_alone(change: Callable[[torch.Tensor], torch.Tensor], kinds: Collection[_Kind]) -> bool:
    """Tell whether what `Module._apply` is to do to tensors would leave those of some kinds as they are."""
    for dtype, device, dimension_count in kinds:
        probe = torch.empty((2,) * dimension_count, dtype=dtype, device=device)
        was_shared = probe.is_shared()
        try:
            if change(probe) is not probe or probe.is_shared() != was_shared:
                return False
        except Exception:  # noqa: BLE001 - whatever it raises for such a tensor, the caller refuses it
            return False
    return True
