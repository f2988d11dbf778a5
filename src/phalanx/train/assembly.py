"""From a configuration to a Step: the one place where settings become arguments of `parallelize`."""

from __future__ import annotations

import torch
from torch import nn

from phalanx.comm.local import LocalWorld
from phalanx.comm.world import World
from phalanx.derive import derive
from phalanx.derive.program import Program
from phalanx.hf import capture_context, is_hf_model
from phalanx.run.optimizer import AdamW, Constant, Cosine, Linear, Rate, adamw
from phalanx.run.step import Step, parallelize
from phalanx.run.values import Values
from phalanx.schedule.measured import read, segment_seconds
from phalanx.train.config import TrainConfig
from phalanx.train.models import Model


def parallel_step(
    config: TrainConfig, world: World | LocalWorld, model: Model, module: nn.Module, values: Values | None = None
) -> Step:
    """The training step of `module` on `world` as `config` asks for it, with the weights of `values` or else of the model."""
    return parallelize(
        module,
        world,
        names=model.names,
        layout=config.parsed_layout(model.dimensions),
        loss=model.loss,
        example=model.example(config.batch or model.batch, config.seq or model.seq, config.seed),
        optimizer=optimizer(config),
        microbatches=config.microbatches,
        schedule=config.schedule,
        chunks=config.chunks,
        seconds=None if config.balance is None else segment_seconds(read(config.balance)),
        zero=config.storage() or config.zero,
        precision=config.precision,
        reduce_dtype=None if config.reduce_dtype is None else getattr(torch, config.reduce_dtype),
        compile=config.compile,
        max_norm=config.optimizer.max_norm,
        barrier=config.barrier,
        recompute=config.recompute,
        values=values or model.values,
        seed=config.seed,
    )


def derived_program(config: TrainConfig, model: Model, module: nn.Module) -> Program:
    """What `parallel_step` would run, without a world to run it on."""
    return derive(
        module,
        config.parsed_mesh(),
        names=model.names,
        layout=config.parsed_layout(model.dimensions),
        loss=model.loss,
        example=model.example(config.batch or model.batch, config.seq or model.seq, config.seed),
        microbatches=config.microbatches,
        recompute=config.recompute,
        precision=config.precision,
        prepare=capture_context if is_hf_model(module) else None,
    )


def optimizer(config: TrainConfig) -> AdamW:
    settings = config.optimizer
    return adamw(
        lr=settings.lr, betas=settings.betas, eps=settings.eps, weight_decay=settings.weight_decay, rate=learning_rate(config)
    )


def learning_rate(config: TrainConfig) -> Rate:
    """Step, from 0, to a factor on the peak rate: linear warm-up, then down to `final` at the last step."""
    settings = config.optimizer
    if settings.decay == "constant":
        return Constant(settings.warmup)
    falling = Cosine if settings.decay == "cosine" else Linear
    return falling(config.steps, settings.warmup, settings.final)
