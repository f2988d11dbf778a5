"""Safetensors files: what is read is the part that was asked for and no byte more; a file that contradicts itself is refused."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from phalanx.hf.weights import INDEX, Ranges, header, read, runs, weights, whole, write

PARTS: list[tuple[Ranges, ...]] = [
    (((0, 6),), ((0, 4),), ((0, 5),)),
    (((2, 3),), ((0, 4),), ((0, 5),)),
    (((0, 6),), ((1, 2),), ((0, 5),)),
    (((0, 6),), ((0, 4),), ((3, 1),)),
    (((1, 1), (4, 2)), ((0, 4),), ((0, 5),)),
    (((5, 1), (0, 1)), ((0, 1), (3, 1)), ((0, 2), (2, 2))),
    (((0, 0),), ((0, 4),), ((0, 5),)),
]


@pytest.mark.parametrize("pieces", PARTS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.bool])
def test_a_part_is_what_was_asked_for(pieces: tuple[Ranges, ...], dtype: torch.dtype, tmp_path: Path) -> None:
    value = torch.randn(6, 4, 5, generator=torch.Generator().manual_seed(0)).to(dtype)
    save_file({"before": torch.ones(3, dtype=torch.int8), "x": value, "y": torch.zeros(2)}, tmp_path / "a.safetensors")
    expected = value
    for dim, ranges in enumerate(pieces):
        index = [start + i for start, length in ranges for i in range(length)]
        expected = expected.index_select(dim, torch.tensor(index, dtype=torch.long))
    got = read(header(tmp_path / "a.safetensors")["x"], pieces)
    assert got.dtype == dtype
    assert torch.equal(got, expected)
    asked = list(runs(value.shape, pieces))
    assert sum(count for _, count in asked) == expected.numel()
    assert all(a + n != b for (a, n), (b, _) in itertools.pairwise(asked)), "two runs that touch are one"


def test_neighbouring_ranges_are_one_read() -> None:
    assert list(runs((6, 4), (((2, 2),), ((0, 4),)))) == [(8, 8)]
    assert list(runs((6, 4), (((0, 1), (1, 1), (4, 2)), ((0, 4),)))) == [(0, 8), (16, 8)]
    assert list(runs((2, 4), (((0, 2),), ((2, 2),)))) == [(2, 2), (6, 2)]
    assert list(runs((2, 4), (((0, 2),), ((2, 2), (0, 2))))) == [(2, 2), (0, 2), (6, 2), (4, 2)]
    assert list(runs((), ())) == [(0, 1)]


def test_scalars_and_empty_tensors(tmp_path: Path) -> None:
    kinds = {"scalar": ((), torch.float32), "none": ((0, 3), torch.bfloat16)}
    write(tmp_path / "a.safetensors", kinds, iter([torch.tensor(2.5), torch.empty(0, 3, dtype=torch.bfloat16)]))
    found = header(tmp_path / "a.safetensors")
    assert read(found["scalar"], ()) == torch.tensor(2.5)
    assert read(found["none"], whole((0, 3))).shape == (0, 3)


def test_what_is_written_is_what_safetensors_reads(tmp_path: Path) -> None:
    values = {
        name: torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)
        for name, shape, dtype in [("b", (3, 5), torch.float64), ("a", (7,), torch.bfloat16), ("ü", (2, 2), torch.float16)]
    }
    kinds = {name: (tuple(value.shape), value.dtype) for name, value in values.items()}
    write(tmp_path / "a.safetensors", kinds, iter(values.values()))
    with safe_open(tmp_path / "a.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
        assert set(file.keys()) == set(values)
        assert all(torch.equal(file.get_tensor(name), value) for name, value in values.items())
    with pytest.raises(ValueError, match=r"b is \(3, 4\).*was to be \(3, 5\)"):
        write(tmp_path / "b.safetensors", kinds, iter([torch.zeros(3, 4, dtype=torch.float64)]))


def of_header(path: Path, entries: Any, space: int, *, text: bytes | None = None) -> Path:
    said = json.dumps(entries).encode() if text is None else text
    path.write_bytes(len(said).to_bytes(8, "little") + said + bytes(space))
    return path


def entry(*offsets: int, dtype: str = "F32", shape: tuple[int, ...] = (2,)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


@pytest.mark.parametrize(
    ("entries", "space", "said"),
    [
        ({"a": entry(0, 8), "b": entry(4, 12)}, 12, "b at bytes 4 to 12 overlaps a, which ends at 8"),
        ({"a": entry(0, 8), "b": entry(12, 20)}, 20, "b at bytes 12 to 20 leaves a gap behind a, which ends at 8"),
        ({"a": entry(4, 12)}, 12, "a at bytes 4 to 12 leaves a gap behind the header"),
        ({"a": entry(0, 8), "b": entry(8, 16)}, 12, "truncated: b is at bytes 8 to 16, and there are 12"),
        ({"a": entry(0, 8)}, 9, "has 9 bytes of tensors; its header says 8"),
        ({"a": entry(0, 4)}, 4, r"a of shape \(2,\) and type F32 needs 8 bytes and has 4"),
        ({"a": entry(0, 8, dtype="F7")}, 8, "a is of type F7, which is not one of F64"),
        ({"a": entry(-8, 0)}, 8, "entry of a has no dtype, shape and data_offsets"),
        ({"a": {"dtype": "F32", "shape": [2]}}, 8, "entry of a has no dtype, shape and data_offsets"),
        ({"a": 3}, 8, "entry of a has no dtype, shape and data_offsets"),
        ([1], 8, r"header of .* is not a JSON object: it is a list"),
    ],
)
def test_headers_that_contradict_the_file(entries: Any, space: int, said: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=said) as caught:
        header(of_header(tmp_path / "a.safetensors", entries, space))
    assert "a.safetensors" in str(caught.value)


def test_files_that_are_none(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    for content, said in [
        (b"", "has 0 bytes"),
        (b"abc", "has 3 bytes"),
        ((1 << 40).to_bytes(8, "little"), f"its header is to have {1 << 40}"),
        (b"version https://git-lfs.github.com/spec/v1", "truncated or no safetensors file"),
    ]:
        path.write_bytes(content)
        with pytest.raises(ValueError, match=said):
            header(path)
    with pytest.raises(ValueError, match=r"header of .* \(7 bytes\) is not a JSON object"):
        header(of_header(path, None, 0, text=b'{"a": 1'))
    with pytest.raises(ValueError, match="a is there twice"):
        header(of_header(path, None, 0, text=b'{"a": 1, "a": 2}'))


def test_a_file_that_has_shrunk_since(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    save_file({"x": torch.zeros(100)}, path)
    found = header(path)["x"]
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - 4)
    with pytest.raises(ValueError, match="ends at byte"):
        read(found, whole((100,)))


def sharded(folder: Path) -> dict[str, Any]:
    save_file({"a": torch.zeros(2)}, folder / "one.safetensors")
    save_file({"b": torch.ones(2)}, folder / "two.safetensors")
    return {"a": "one.safetensors", "b": "two.safetensors"}


def test_shards_are_found_by_the_index(tmp_path: Path) -> None:
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": sharded(tmp_path)}))
    assert {name: stored.path.name for name, stored in weights(tmp_path).items()} == sharded(tmp_path)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda m: m | {"c": "three.safetensors"}, r"names three\.safetensors: 1 of 3 files are not there"),
        (lambda m: m | {"c": "one.safetensors"}, "one.safetensors lacks c, which the index says is there"),
        (lambda m: {"a": m["a"]} | {"b": "one.safetensors"}, "one.safetensors lacks b"),
        (lambda m: m | {"c": "../one.safetensors"}, "outside of its folder"),
        (lambda m: {}, "no weight_map"),
        (lambda m: [1], "no weight_map"),
    ],
)
def test_an_index_that_does_not_fit_its_shards(change: Callable[[Any], Any], said: str, tmp_path: Path) -> None:
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": change(sharded(tmp_path))}))
    with pytest.raises(ValueError, match=said):
        weights(tmp_path)


def test_a_tensor_that_the_index_does_not_know(tmp_path: Path) -> None:
    listed = sharded(tmp_path)
    save_file({"b": torch.ones(2), "more": torch.ones(2)}, tmp_path / "two.safetensors")
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": listed}))
    with pytest.raises(ValueError, match=r"two\.safetensors has more, of which the index says nothing"):
        weights(tmp_path)


def test_folders_without_safetensors(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has no weights: neither"):
        weights(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ValueError, match=r"pytorch_model\.bin, which is pickled code.*save_pretrained"):
        weights(tmp_path)
