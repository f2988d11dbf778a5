"""PyTorch's own suite for process groups, read from the installed wheel and rewritten in memory for a CPU backend.

Nothing of it is copied here. Its gates are written for the backends that PyTorch ships, so all of them are dropped, and what must not
run is named in `skips.py` instead. Where a test moves a model to a GPU, the CPU stands in: the collectives, and what DDP does with
them, are the same.
"""

from __future__ import annotations

import ast
import importlib.util
import marshal
import os
import sys
from pathlib import Path
from types import ModuleType

SUITE = "torch.testing._internal.distributed.distributed_test"
# Decorators that change what a test does. All others only decide whether it runs.
KEPT = {"with_dist_debug_levels", "parametrize"}
# How the suite spells "this rank's GPU" where it passes a device.
OWN_GPU = {"rank", "self.rank", "device_id", "'cuda'", "torch.cuda.current_device()"}
# Of no effect on the CPU, and an error without a GPU.
CUDA_CALLS = {"torch.cuda.set_device", "torch.cuda.synchronize"}
# Gloo's words for an error, and what ours may say instead.
WORDS = {" (Timed out|closed|timeout) ": " (Timed out|closed|timeout|waited) "}
# Sizes meant for a GPU: (test, variable) and what it is here.
LIGHTER = {("test_ddp_uneven_inputs", "dim"): 32}


def suite_path() -> Path:
    spec = importlib.util.find_spec(SUITE)
    assert spec is not None and spec.origin is not None
    return Path(spec.origin)


def compiled() -> bytes:
    """The rewritten suite as marshalled code; made once, since that takes longer than most tests."""
    path = suite_path()
    tree = ast.fix_missing_locations(ForTheCpu().visit(ast.parse(path.read_text())))
    return marshal.dumps(compile(tree, str(path), "exec", dont_inherit=True))


def load(code: bytes, backend: str, size: int) -> ModuleType:
    """The suite as a module of this process, whose tests are methods of `DistributedTest._DistTestBase`."""
    os.environ |= {"BACKEND": backend, "WORLD_SIZE": str(size), "INIT_METHOD": "file://"}
    module = ModuleType("stock_suite")
    sys.modules[module.__name__] = module  # the object collectives pickle its classes by this name
    exec(marshal.loads(code), module.__dict__)
    module.__dict__["init_multigpu_helper"] = lambda size, _: {rank: [rank] for rank in range(size)}
    return module


class ForTheCpu(ast.NodeTransformer):
    """Rules of the rewriting, each on a syntax tree."""

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        self.generic_visit(node)
        if node.name.startswith("test_"):
            node.decorator_list = [each for each in node.decorator_list if _called(each) in KEPT]
        for each in ast.walk(node):
            if isinstance(each, ast.Assign) and (size := LIGHTER.get((node.name, ast.unparse(each.targets[0])))):
                each.value = ast.Constant(size)
        return node

    def visit_Constant(self, node: ast.Constant) -> ast.Constant:
        if isinstance(node.value, str):
            node.value = WORDS.get(node.value, node.value)
        return node

    def visit_Compare(self, node: ast.Compare) -> ast.expr:
        """`BACKEND == "gloo"` means a backend of CPU tensors: ours does what Gloo does."""
        self.generic_visit(node)
        if ast.unparse(node.left) == "BACKEND" and ast.unparse(node.comparators[0]) == "'gloo'":
            return ast.Constant(isinstance(node.ops[0], ast.Eq))
        return node

    def visit_Call(self, node: ast.Call) -> ast.expr:
        self.generic_visit(node)
        called = ast.unparse(node.func)
        if called in CUDA_CALLS:
            return ast.Constant(None)
        if called == "torch.device" and node.args and "cuda" in ast.unparse(node.args[0]):
            return ast.Call(node.func, [ast.Constant("cpu")], [])
        if isinstance(node.func, ast.Attribute) and _moves_to_gpu(node, node.func.attr):
            return node.func.value
        node.keywords = [each for each in node.keywords if each.arg not in ("device_ids", "output_device")]
        for each in node.keywords:
            if each.arg == "device" and ast.unparse(each.value) in OWN_GPU:
                each.value = ast.Constant("cpu")
            if each.arg == "backend" and ast.unparse(each.value) == "'nccl'":
                each.value = ast.Name("BACKEND", ast.Load())
        return node


def _called(decorator: ast.expr) -> str:
    return ast.unparse(decorator.func if isinstance(decorator, ast.Call) else decorator)


def _moves_to_gpu(node: ast.Call, method: str) -> bool:
    return method == "cuda" or (method == "to" and len(node.args) == 1 and ast.unparse(node.args[0]) in OWN_GPU)
