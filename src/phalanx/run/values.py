"""What parameters and buffers start as: the module's own values, or a recorded initialisation evaluated shard by shard."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from phalanx.comm.world import World
from phalanx.derive.program import Parameter
from phalanx.run.initialize import ATTRIBUTE, initial_shard
from phalanx.spec import shard

Values = Callable[[Parameter, World], Tensor]
"""The shard of a parameter that a rank starts with, where the module itself does not say."""


def real_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers that have values already."""
    named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {name: x for name, x in named.items() if not x.is_meta}


def initial_values(model: nn.Module, world: World, seed: int) -> Callable[[Parameter], Tensor]:
    """The shard of a parameter or buffer that a rank starts with."""
    tensors = {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }
    recorded = hasattr(model, ATTRIBUTE)

    def value(parameter: Parameter) -> Tensor:
        own = tensors[parameter.name]
        if not own.is_meta:
            return shard(parameter.padded(own.detach()), parameter.spec, world.mesh, world.rank)
        if not recorded:
            raise ValueError(
                f"{parameter.name} is a meta tensor and nobody has recorded how it starts: build the model with "
                "phx.deferred_init(lambda: Model(...)), or give it values first"
            )
        return initial_shard(
            model, parameter.name, parameter.spec, world.mesh, world.rank, seed, world.device, padded=parameter.shape
        )

    return value
