"""Requests: sizes as nccl-tests reads them, the cases they become, and what is refused before any rank starts."""

from __future__ import annotations

import importlib.util
import shutil
from dataclasses import replace

import pytest
import torch

from phalanx.bench.mpi import check_mpi
from phalanx.bench.sweep import BACKENDS, Effort, Request, check, names, op_names, parse_size, sizes
from phalanx.cli.bench.collectives import main

REQUEST = Request(("all_reduce",), (1024,), 4, ("gloo",), "gloo")


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("8", 8),
        ("1K", 1024),
        ("1k", 1024),
        ("32M", 33554432),
        ("1.5M", 1572864),
        ("2G", 2147483648),
        ("64 KiB", 65536),
        ("1MB", 2**20),
    ],
)
def test_sizes_are_binary(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "K", "-1", "1T", "1e6", "0", "0.1", "12 apples"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(ValueError, match="size"):
        parse_size(text)


def test_sweep() -> None:
    assert sizes(8, 128, 4) == (8, 32, 128)
    assert sizes(8, 127, 4) == (8, 32)
    assert sizes(64, 64, 1) == (64,)
    with pytest.raises(ValueError, match="-e is 4 bytes, less than -b, 8 bytes"):
        sizes(8, 4, 2)
    with pytest.raises(ValueError, match="-f is 1"):
        sizes(8, 16, 1)


def test_names() -> None:
    assert op_names(["allreduce,all-gather", "all_reduce"]) == ("all_reduce", "all_gather")
    assert len(op_names(["all"])) == 9
    assert names("backend", ["gloo, mpi", "gloo"], BACKENDS) == ("gloo", "mpi")
    with pytest.raises(ValueError, match="no operation 'all_reduct'; did you mean 'all_reduce'"):
        op_names(["all_reduct"])
    with pytest.raises(ValueError, match="no backend 'glo'; did you mean 'gloo'"):
        names("backend", ["glo"], BACKENDS)


def test_one_backend_is_measured_against_itself() -> None:
    labels = [case.label for case in REQUEST.rounds()[0]]
    assert labels == ["gloo", "gloo(A/A)"]


def test_backends_alternate_and_the_baseline_is_repeated_if_asked() -> None:
    request = replace(REQUEST, backends=("shm", "gloo", "mpi"), baseline="gloo", resident=True, sizes=(64, 128))
    assert [[case.label for case in cases] for cases in request.rounds()] == [["shm+resident", "gloo", "mpi"]] * 2
    again = replace(request, again=True, buffers=("cold", "hot"))
    assert [case.label for case in again.rounds()[0]] == ["shm+resident", "gloo", "mpi", "gloo(A/A)"]
    assert [(cases[0].buffers, cases[0].size) for cases in again.rounds()] == [
        ("cold", 64), ("cold", 128), ("hot", 64), ("hot", 128),
    ]  # fmt: skip


def test_a_case_has_only_what_its_operation_has() -> None:
    request = replace(REQUEST, ops=("all_gather", "reduce"), root=2, redop="max")
    gather, reduce = (cases[0] for cases in request.rounds())
    assert (gather.redop, gather.root, gather.count, gather.size) == ("none", -1, 64, 1024)
    assert (reduce.redop, reduce.root, reduce.count, reduce.size) == ("max", 2, 256, 1024)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"group": 1}, "a group of 1 rank moves nothing"),
        ({"root": 4}, "--root is 4, but a group has the ranks 0 to 3"),
        ({"resident": True}, "--resident is about tensors of the backend shm, but --backends is gloo"),
        ({"baseline": "nccl"}, "--baseline is nccl, which is not measured"),
        ({"ops": ("all_gather",), "sizes": (63, 128)}, "all_gather of 63 bytes is less than 16 bytes for each of 4 ranks"),
        ({"sizes": (3,)}, "all_reduce of 3 bytes is less than one element of float"),
        ({"dtype": "int32", "redop": "avg"}, "an average of int32 has no exact result"),
        ({"dtype": "int8", "group": 128}, "int8 is exact up to 127, so a sum over 128 ranks overflows"),
        ({"dtype": "bfloat16", "group": 257}, "bfloat16 is exact up to 256, so a sum over 257 ranks"),
    ],
)
def test_what_means_nothing_is_refused(change: dict[str, object], message: str) -> None:
    check(REQUEST)
    with pytest.raises(ValueError, match=message):
        check(replace(REQUEST, **change))  # type: ignore[arg-type]


def test_what_is_not_checked_need_not_be_exact() -> None:
    check(replace(REQUEST, dtype="int8", group=128), validate=False)
    check(replace(REQUEST, dtype="int8", group=128, redop="max"))


def test_effort() -> None:
    with pytest.raises(ValueError, match="iterations is 0"):
        Effort(iterations=0)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ("--op all_reduce --backends gloo", "how many ranks"),
        ("--ranks 1 --backends gloo", "a group of 1 rank"),
        ("--ranks 4 --mesh dp=2 --backends gloo", "mesh dp=2 has 2 ranks, but --ranks is 4"),
        ("--ranks 2 --axis tp --backends gloo", "--axis tp is about a mesh"),
        ("--mesh dp=2,tp=2 --axis tq --backends gloo", "no axis 'tq'; did you mean 'tp'"),
        ("--mesh dp=2,tp=1 --axis tp --backends gloo", "a group of 1 rank"),
        ("--ranks 2 --backends gloo --dtype float23", "no dtype 'float23'; did you mean 'float32'"),
        ("--ranks 2 --backends gloo --redop summ", "no redop 'summ'; did you mean 'sum'"),
        ("--ranks 2 --backends gloo --plot x.jpeg", "there are .png, .svg, .pdf"),
        ("--ranks 2 --backends gloo --json /nowhere/x.json", "no folder /nowhere"),
        ("--ranks 2 --backends gloo --iters 0", "iterations is 0"),
    ],
)
def test_the_command_refuses(args: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        main(args.split())


@pytest.mark.skipif(torch.cuda.is_available(), reason="here is a GPU")
def test_nccl_needs_gpus() -> None:
    with pytest.raises(ValueError, match="nccl needs a GPU for each rank, and this machine has 0"):
        main(["--ranks", "2", "--backends", "nccl"])
    with pytest.raises(ValueError, match="nccl is measured on CUDA tensors, which mpi does not take"):
        main(["--ranks", "2", "--backends", "nccl,gloo,mpi"])


def test_what_mpi_needs_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"not installed: pip install 'phalanx\[mpi\]'"):
        check_mpi(None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(ValueError, match="apt-get install openmpi-bin"):
        check_mpi(None)
    with pytest.raises(ValueError, match="but torchrun started these"):
        check_mpi("torchrun")
    check_mpi("mpirun (Open MPI)")
