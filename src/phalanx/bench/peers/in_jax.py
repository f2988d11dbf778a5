"""The same Llama and step in JAX, under jit with NamedSharding: a process of its own that takes a step for every line it reads.

    python -m phalanx.bench.peers.in_jax FOLDER AXIS

FOLDER has weights.npz (by the names of models/llama.py), batch.npz and settings.json; AXIS is dp or tp. The devices are those that
XLA_FLAGS asks for. Each answer is a line of JSON: the loss and the norm of all gradients. Nothing here imports torch.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

Weights = dict[str, Any]
COLUMNS = (
    "q_proj.weight",
    "k_proj.weight",
    "v_proj.weight",
    "gate_proj.weight",
    "up_proj.weight",
    "lm_head.weight",
    "embed_tokens.weight",
)
ROWS = ("o_proj.weight", "down_proj.weight")


def main() -> None:
    folder, axis = Path(sys.argv[1]), sys.argv[2]
    settings = json.loads((folder / "settings.json").read_text())
    mesh = Mesh(np.array(jax.devices()), (axis,))
    weights = {name: jnp.asarray(x) for name, x in np.load(folder / "weights.npz").items()}
    batch = {name: jnp.asarray(x) for name, x in np.load(folder / "batch.npz").items()}
    placed = {name: NamedSharding(mesh, spec(name, axis)) for name in weights}
    weights = {name: jax.device_put(x, placed[name]) for name, x in weights.items()}
    first, second = ({name: jax.device_put(jnp.zeros_like(x), placed[name]) for name, x in weights.items()} for _ in range(2))
    samples = NamedSharding(mesh, PartitionSpec(axis) if axis == "dp" else PartitionSpec())
    batch = {name: jax.device_put(x, samples) for name, x in batch.items()}
    step: Callable[..., Any] = jax.jit(
        partial(train, settings), donate_argnums=(0, 1, 2), out_shardings=(placed, placed, placed, None, None)
    )
    print(json.dumps({"devices": len(jax.devices()), "jax": jax.__version__}), flush=True)
    for count, _ in enumerate(sys.stdin, start=1):
        weights, first, second, loss, norm = step(weights, first, second, batch, jnp.float32(count))
        # The weights are waited for as well: a step ends when all of it is done.
        jax.block_until_ready(weights)
        print(json.dumps([float(loss), float(norm)]), flush=True)


def spec(name: str, axis: str) -> PartitionSpec:
    """Megatron's split of the weights under tp; whole everywhere under dp."""
    if axis == "tp" and name.endswith(COLUMNS):
        return PartitionSpec(axis, None)
    if axis == "tp" and name.endswith(ROWS):
        return PartitionSpec(None, axis)
    return PartitionSpec()


def train(settings: Any, weights: Weights, first: Weights, second: Weights, batch: Weights, count: Any) -> Any:
    """AdamW as torch computes it: Loshchilov and Hutter 2019, algorithm 2."""
    loss, gradients = jax.value_and_grad(partial(mean_loss, settings))(weights, batch["tokens"], batch["targets"])
    norm = jnp.sqrt(sum(jnp.sum(jnp.square(g)) for g in gradients.values()))
    beta_1, beta_2, eps = 0.9, 0.999, 1e-8
    for name, g in gradients.items():
        first[name] = beta_1 * first[name] + (1 - beta_1) * g
        second[name] = beta_2 * second[name] + (1 - beta_2) * jnp.square(g)
        decay = settings["weight_decay"] if g.ndim > 1 else 0.0
        root = jnp.sqrt(second[name] / (1 - beta_2**count)) + eps
        update = first[name] / (1 - beta_1**count) / root
        weights[name] = weights[name] * (1 - settings["lr"] * decay) - settings["lr"] * update
    return weights, first, second, loss, norm


def mean_loss(settings: Any, weights: Weights, tokens: Any, targets: Any) -> Any:
    logits = forward(settings, weights, tokens)
    chosen = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - chosen)


def forward(settings: Any, weights: Weights, tokens: Any) -> Any:
    """(batch, seq) -> (batch, seq, vocab)"""
    x = weights["embed_tokens.weight"][tokens]
    width = settings["hidden"] // settings["heads"]
    frequency = settings["theta"] ** (-jnp.arange(0, width, 2, dtype=jnp.float32) / width)
    angle = jnp.arange(tokens.shape[1], dtype=jnp.float32)[:, None] * frequency
    angle = jnp.concatenate((angle, angle), axis=-1)  # (seq, width)
    for at in range(settings["layers"]):
        layer = {name.removeprefix(f"layers.{at}."): w for name, w in weights.items() if name.startswith(f"layers.{at}.")}
        x = x + attention(layer, norm(x, layer["input_layernorm.weight"], settings), jnp.cos(angle), jnp.sin(angle))
        y = norm(x, layer["post_attention_layernorm.weight"], settings)
        inner = jax.nn.silu(y @ layer["mlp.gate_proj.weight"].T) * (y @ layer["mlp.up_proj.weight"].T)
        x = x + inner @ layer["mlp.down_proj.weight"].T
    return norm(x, weights["norm.weight"], settings) @ weights["lm_head.weight"].T


def norm(x: Any, weight: Any, settings: Any) -> Any:
    return weight * (x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + settings["eps"]))


def attention(layer: Weights, x: Any, cos: Any, sin: Any) -> Any:
    width, seq = cos.shape[-1], x.shape[1]
    q, k, v = (
        (x @ layer[f"self_attn.{name}.weight"].T).reshape(*x.shape[:2], -1, width).swapaxes(1, 2)  # (batch, heads, seq, width)
        for name in ("q_proj", "k_proj", "v_proj")
    )
    q, k = rotate(q, cos, sin), rotate(k, cos, sin)
    k, v = (jnp.repeat(each, q.shape[1] // k.shape[1], axis=1) for each in (k, v))
    scores = jnp.einsum("bhqd,bhkd->bhqk", q, k) / width**0.5
    scores = jnp.where(jnp.tril(jnp.ones((seq, seq), dtype=bool)), scores, -jnp.inf)
    y = jnp.einsum("bhqk,bhkd->bhqd", jax.nn.softmax(scores, axis=-1), v)
    return y.swapaxes(1, 2).reshape(*x.shape[:2], -1) @ layer["self_attn.o_proj.weight"].T


def rotate(x: Any, cos: Any, sin: Any) -> Any:
    first, second = jnp.split(x, 2, axis=-1)
    return x * cos + jnp.concatenate((-second, first), axis=-1) * sin


if __name__ == "__main__":
    main()
