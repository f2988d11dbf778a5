"""Recomputation changes what is saved, never what comes out: bit for bit, for every choice, with one graph B or with I and W."""

from __future__ import annotations

import functools
import itertools
import math
import random
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from phalanx import rules
from phalanx.derive import capture, derive, derive_captured
from phalanx.derive.cost import COLLECTIVES
from phalanx.derive.cut import minimum_cut
from phalanx.derive.program import Captured, Graphs, Program
from phalanx.derive.recompute import choices, parse_choice
from phalanx.mesh import Mesh
from phalanx.models.llama import Llama, LlamaConfig, loss
from phalanx.run.initialize import deferred_init

from .parity import on_mesh
from .split_cases import Case, case
from .test_split import Run, assert_equal

aten = torch.ops.aten
CONFIG = LlamaConfig(vocab=32, hidden=32, inner=96, layers=2, heads=4, kv_heads=2, dropout=0.25)
SEQUENCE_PARALLEL = {"batch": "dp", "heads": "tp", "mlp": "tp", "vocab": "tp", "residual_seq": "tp"}


@functools.cache
def made(name: str, recompute: str | int = "none", dtype: torch.dtype = torch.float64) -> tuple[Case, Graphs]:
    one = case(name, dtype)
    return one, one.split(recompute=recompute, accumulate=True)


def between(name: str, dtype: torch.dtype = torch.float64) -> int:
    """A limit that neither saves all nor only the inputs."""
    none, full = (made(name, choice, dtype)[1].saved_bytes for choice in ("none", "full"))
    return (none + 2 * full) // 3


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *((name, torch.float64) for name in ("mlp", "gelu", "llama", "epilogue", "fused", "conv", "through")),
        ("llama", torch.float32),
    ],
)
def test_every_choice_gives_the_same_bits(name: str, dtype: torch.dtype) -> None:
    wanted = Run(*made(name, "none", dtype))
    for choice in ("selective", between(name, dtype)):  # of full test_split says so
        one, graphs = made(name, choice, dtype)
        run = Run(one, graphs)
        assert_equal(run.outputs, wanted.outputs, f"output, {choice}")
        for ours, theirs, what in ((run.grad_inputs, wanted.grad_inputs, "grad_input"), (run.grads, wanted.grads, "grad")):
            assert_equal(ours, theirs, f"{what}, {choice}")
        assert_equal(run.grad_inputs_split, wanted.grad_inputs, f"grad_input of I, {choice}")
        assert_equal(run.grads_split, wanted.grads, f"grad of W, {choice}")
        assert graphs.flops["I"] + graphs.flops["W"] == graphs.flops["B"], "a product is made twice"
        assert graphs.saved_bytes == sum(t.untyped_storage().nbytes() for t in run.saved)


@pytest.mark.parametrize("choice", ["none", "selective", "full", 70_000])
def test_between_i_and_w_wait_the_operands_of_the_weight_products_alone(choice: str | int) -> None:
    """Of a llama block of 2 x 16 tokens: inputs and output gradients of seven linear layers, and two finished norm gradients."""
    one, graphs = made("llama", choice)
    run = Run(one, graphs)
    tokens, hidden, keys, inner, number = 32, 32, 16, 96, 8
    inputs = (
        2 * hidden + hidden + inner
    )  # two norms' results, of attention, of the gated MLP: shared by q, k, v and by gate, up
    gradients = hidden + 2 * keys + hidden + 2 * inner + hidden  # of q, k and v, of o, of gate and up, of down
    kept = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in (*run.saved_for_w, *run.pending)}
    assert sum(kept.values()) == number * (tokens * (inputs + gradients) + 2 * hidden)
    products = [n for n in graphs.W.graph.nodes if n.target is aten.mm.default]
    assert len(products) == 7
    # in W nothing is left but products and a norm's multiplication by its weight, whose operand is as large as its result
    assert graphs.flops["W"] == 2 * tokens * (2 * hidden * hidden + 2 * hidden * keys + 3 * hidden * inner)
    assert {str(n.target) for n in graphs.W.graph.nodes if n.op == "call_function"} <= {
        "aten.mm.default", "aten.t.default", "aten.view.default", "aten._unsafe_view.default", "aten.transpose.int", "aten.mul.Tensor",
    }  # fmt: skip


def test_selective_saves_around_attention_and_activations() -> None:
    """Saved of a llama block: inputs, rotated q and k, v, the residual, gate and up, and the statistics of two norms."""
    one, graphs = made("llama", "selective")
    _, none = made("llama")
    tokens, hidden, keys, inner, number = 32, 32, 16, 96, 8
    tables = 2 * 16 * 8
    assert graphs.saved_bytes == number * (tokens * (3 * hidden + 2 * keys + 2 * inner + 2) + tables)
    statistics = 2 * 4 * 16  # logsumexp, of every query of every head
    assert none.saved_bytes - graphs.saved_bytes == number * (tokens * (hidden + inner) + statistics)
    scores = 2 * 4 * 16 * 16  # batch, heads, queries, keys; two products over a width of 8
    assert graphs.flops["B"] - none.flops["B"] == 2 * 2 * scores * 8
    assert graphs.flops["F"] == none.flops["F"]
    again = _targets(graphs.B)
    assert sum("_scaled_dot_product" in target for target in again) == 2  # forward and backward
    assert again.count("aten.mm.default") == _targets(none.B).count("aten.mm.default")
    assert Run(one, graphs).saved


def test_full_makes_every_product_but_the_last_again() -> None:
    """Of the forward only what the backward reads: not the down projection, whose result is the segment's output."""
    _, full = made("llama", "full")
    _, none = made("llama")
    tokens, hidden, inner, number = 32, 32, 96, 8
    assert full.saved_bytes == number * (tokens * hidden + 2 * 16 * 8)
    assert full.flops["B"] - none.flops["B"] == none.flops["F"] - 2 * tokens * hidden * inner


@pytest.mark.parametrize("name", ["gelu", "llama", "fused"])
def test_a_limit_is_kept_and_costs_more_the_lower_it_is(name: str) -> None:
    _, none = made(name)
    least = _least(name)
    spent = []
    for part in (1.0, 0.75, 0.5, 0.25, 0.0):
        limit = int(least + part * (none.saved_bytes - least))
        _, graphs = made(name, limit)
        assert least <= graphs.saved_bytes <= limit
        spent.append(graphs.flops["B"])
    assert spent == sorted(spent)
    assert spent[0] == none.flops["B"] and made(name, none.saved_bytes)[1].saved_bytes == none.saved_bytes
    assert made(name, "full")[1].saved_bytes >= least


def test_a_limit_below_the_least_is_refused_with_the_least() -> None:
    least = _least("llama")
    with pytest.raises(ValueError, match=rf"recompute is {least - 1} bytes, but layers\.3 saves at least {least}, whatever"):
        case("llama", torch.float64).split(recompute=least - 1, segment="layers.3")


def test_a_choice_by_segment_makes_classes_of_their_own() -> None:
    program = derive_captured(captured(), Mesh(), layout={}, recompute={"layers.1": "full", "layers.*": "selective"})
    one, two = (segment.cls.graphs for segment in program.segments[1:3])
    selective, full = (derived(Mesh(), choice).segments for choice in ("selective", "full"))
    assert (
        one
        and two
        and [one.saved_bytes, two.saved_bytes]
        == [
            segments[1].cls.graphs.saved_bytes  # type: ignore[union-attr]
            for segments in (selective, full)
        ]
    )
    assert one.saved_bytes > two.saved_bytes
    assert selective[1].cls is selective[2].cls and full[1].cls is full[2].cls


def test_dropout_and_collectives_on_a_mesh() -> None:
    """Loss and gradients are equal bit for bit, masks included; selective sends nothing more than none."""
    mesh = Mesh(dp=2, tp=2)
    torch.manual_seed(0)
    params = {n: p.detach() for n, p in Llama(CONFIG).double().named_parameters()}
    wanted = on_mesh(derived(mesh, "none"), params, {}, batch())
    sent = {}
    for choice in ("none", "selective", "full", "24KiB"):
        program = derived(mesh, choice)
        graphs = program.segments[1].cls.graphs
        assert graphs is not None
        sent[choice] = sum(_is_collective(n) for n in graphs.B.graph.nodes)
        masks = sum(n.target is torch.ops.phx.dropout_mask.default for n in graphs.B.graph.nodes)
        assert masks == {"none": 0, "selective": 2, "full": 2}.get(choice, masks)
        for how in ("graphs", "split"):
            found = on_mesh(program, params, {}, batch(), how=how)
            assert torch.equal(found.loss, wanted.loss), (choice, how)
            assert found.grads.keys() == wanted.grads.keys()
            assert all(torch.equal(found.grads[n], g) for n, g in wanted.grads.items()), (choice, how)
    # full gathers before q, k, v and before gate, up again, and scatters behind o; behind down it is not read
    assert sent["selective"] == sent["none"] and sent["full"] == sent["none"] + 3


def test_gpt2_of_hugging_face() -> None:
    """Attention spelt out as products and a softmax, as eager attention is: its scores are made again, no weight's product is."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=64,
        n_positions=16,
        n_embd=32,
        n_layer=2,
        n_head=4,
        attn_implementation="eager",
        resid_pdrop=0.1,
        attn_pdrop=0.1,
    )
    model = transformers.GPT2LMHeadModel(config).double()
    from phalanx import hf

    batch = {"input_ids": torch.randint(0, 64, (2, 16)), "labels": torch.randint(0, 64, (2, 16))}
    results, blocks = {}, {}
    for choice in ("none", "selective"):
        program = derive(model, Mesh(), example=batch, prepare=hf.capture_context, recompute=choice)
        values = dict(model.named_parameters()) | dict(model.named_buffers())
        params = {n: values[n].detach() for n in program.parameters}
        results[choice] = on_mesh(program, params, {n: values[n] for n in program.buffers}, batch, how="split")
        blocks[choice] = program.segments[1].cls.graphs
    assert torch.equal(results["selective"].loss, results["none"].loss)
    assert all(torch.equal(results["selective"].grads[n], g) for n, g in results["none"].grads.items())
    none, selective = blocks["none"], blocks["selective"]
    assert none is not None and selective is not None
    scores = 8 * 2 * 4 * 16 * 16
    largest = [n.meta["val"].numel() * 8 for n in selective.F.graph.output_node().args[0][1]]  # type: ignore[index,union-attr]
    assert none.saved_bytes - selective.saved_bytes > 2 * scores
    assert scores > 0 and largest.count(scores) == 0


@pytest.mark.parametrize(
    ("choice", "parsed"),
    [
        ("none", "none"),
        ("selective", "selective"),
        ("full", "full"),
        ("64MiB", 64 << 20),
        ("1.5 KiB", 1536),
        ("7B", 7),
        (12, 12),
    ],
)
def test_choices_that_there_are(choice: object, parsed: object) -> None:
    assert parse_choice(choice) == parsed


@pytest.mark.parametrize("choice", ["ful", "64", "64MB", "-1MiB", -1, True, None, 1.5, ["full"]])
def test_other_choices_are_refused_with_those_there_are(choice: object) -> None:
    for wrong in (choice, {"layers.*": choice}):
        with pytest.raises(ValueError, match=r"recompute is .*; it is 'none', 'selective', 'full', a limit .* '64MiB'"):
            choices(wrong, ["prologue", "layers.0"])


def test_a_pattern_that_matches_no_segment_is_refused() -> None:
    with pytest.raises(ValueError, match=r"recompute has 'layer\.\*', which matches no segment; there are prologue, layers\.0"):
        choices({"*": "none", "layer.*": "full"}, ["prologue", "layers.0"])


def test_the_minimum_cut_is_the_least_of_all_and_the_smallest() -> None:
    """Every graph of five nodes between source and sink against all 32 cuts."""
    rng = random.Random(0)
    for _ in range(200):
        nodes = ["s", *range(5), "t"]
        edges = {
            (a, b): rng.choice([0, 1, 2, 3, 7, math.inf if {a, b} != {"s", "t"} else 1])
            for a, b in itertools.permutations(nodes, 2)
            if rng.random() < 0.4
        }
        sides = [{"s", *chosen} for k in range(6) for chosen in itertools.combinations(range(5), k)]
        least = min(_capacity(edges, side) for side in sides)
        if least == math.inf:
            with pytest.raises(AssertionError, match="no cut separates s from t"):
                minimum_cut(edges, "s", "t")
            continue
        found = minimum_cut(edges, "s", "t")
        best = [side for side in sides if _capacity(edges, side) == least]
        assert found in best
        assert all(found <= side for side in best)


def _capacity(edges: Mapping[Any, float], side: set[Any]) -> float:
    return sum(capacity for (a, b), capacity in edges.items() if a in side and b not in side)


@functools.cache
def captured() -> Captured:
    model = deferred_init(lambda: Llama(CONFIG).double())
    return capture(model, batch(), loss)


@functools.cache
def batch() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {key: torch.randint(0, CONFIG.vocab, (4, 16), generator=generator) for key in ("tokens", "targets")}


@functools.cache
def derived(mesh: Mesh, recompute: str) -> Program:
    names = rules.table_for(Llama(CONFIG), batch()) if mesh.size > 1 else None
    layout = SEQUENCE_PARALLEL if mesh.size > 1 else {}
    return derive_captured(captured(), mesh, names=names, layout=layout, recompute=recompute)


def _least(name: str) -> int:
    with pytest.raises(ValueError, match="saves at least") as refused:
        case(name, torch.float64).split(recompute=0)
    return int(str(refused.value).split("at least ")[1].split(",")[0])


def _targets(graph: fx.GraphModule) -> list[str]:
    return [str(n.target) for n in graph.graph.nodes]


def _is_collective(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.name in COLLECTIVES
