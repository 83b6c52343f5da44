"""Lazy tensors give the rows that the same operations on whole tensors give, in whatever blocks they are read."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_arpo.weights import block_copy, lazy_tensor
from megatron_arpo.weights.block_copy import Placement, write_tensors
from megatron_arpo.weights.lazy_tensor import (
    CastTensor,
    HeldTensor,
    JoinedTensor,
    LazyTensor,
    RowRun,
    StoredTensor,
    Tile,
    TiledTensor,
    read_whole,
)


def read_in_pieces(tensor: LazyTensor, step: int) -> torch.Tensor:
    columns = lazy_tensor.num_columns(tensor)
    parts = []
    for start in range(0, tensor.shape[0], step):
        rows = torch.empty((min(step, tensor.shape[0] - start), columns), dtype=tensor.dtype)
        tensor.read_rows(start, rows)
        parts.append(rows)
    return torch.cat(parts).reshape(tensor.shape)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_joined_is_a_concatenation_of_slices(data: st.DataObject) -> None:
    source = torch.arange(60.0).reshape(12, 5)
    runs, parts = [], []
    for _ in range(data.draw(st.integers(1, 5))):
        start = data.draw(st.integers(0, 11))
        count = data.draw(st.integers(1, 12 - start))
        is_zero = data.draw(st.booleans())
        runs.append(RowRun(None if is_zero else HeldTensor(source), start, count))
        parts.append(torch.zeros(count, 5) if is_zero else source[start : start + count])
    whole = torch.cat(parts)
    joined = JoinedTensor(torch.float32, tuple(whole.shape), runs)
    assert torch.equal(read_in_pieces(joined, data.draw(st.integers(1, 7))), whole)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_tiled_puts_a_cut_matrix_together(data: st.DataObject) -> None:
    rows, columns = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 9))
    whole = torch.arange(float(rows * columns)).reshape(rows, columns)
    row_cuts = sorted({0, rows, *data.draw(st.lists(st.integers(0, rows)))})
    column_cuts = sorted({0, columns, *data.draw(st.lists(st.integers(0, columns)))})
    tiles = [
        Tile(HeldTensor(whole[top:bottom, left:right].contiguous()), top, left)
        for top, bottom in itertools.pairwise(row_cuts)
        for left, right in itertools.pairwise(column_cuts)
    ]
    tiled = TiledTensor(torch.float32, (rows, columns), data.draw(st.permutations(tiles)))
    assert torch.equal(read_in_pieces(tiled, data.draw(st.integers(1, 5))), whole)


def test_tiles_that_miss_a_part_are_refused() -> None:
    with pytest.raises(ValueError, match=r"parts of 4 elements don't make a tensor of shape \(3, 2\)"):
        TiledTensor(torch.float32, (3, 2), [Tile(HeldTensor(torch.ones(2, 2)), 0, 0)])
    with pytest.raises(ValueError, match=r"runs of 2 rows don't make"):
        JoinedTensor(torch.float32, (3, 2), [RowRun(None, 0, 2)])


def test_cast_and_vectors() -> None:
    tensor = torch.tensor([1.0, 2.5, -3.0])
    assert torch.equal(read_whole(CastTensor(HeldTensor(tensor), torch.bfloat16)), tensor.bfloat16())
    assert torch.equal(read_in_pieces(HeldTensor(tensor), 2), tensor)


def test_a_file_that_ends_too_early_is_named(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    path.write_bytes(bytes(range(20)))
    assert read_whole(StoredTensor(path, 4, torch.uint8, (2, 3))).tolist() == [[4, 5, 6], [7, 8, 9]]
    with pytest.raises(ValueError, match=r"weights: ends at byte 20, within a tensor; the file is truncated"):
        read_whole(StoredTensor(path, 4, torch.uint8, (5, 4)))


@pytest.mark.parametrize("workers", [1, 3])
def test_blocks_of_all_files_reach_their_places(tmp_path: Path, workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lazy_tensor, "_BLOCK_BYTES", 64)
    placements, expected = [], {}
    for file in range(2):
        path, content = tmp_path / str(file), b"head"
        for seed in range(4):
            tensor = torch.randn(7, 1 + 9 * seed, generator=torch.Generator().manual_seed(seed))
            placements.append(Placement(path, len(content), HeldTensor(tensor)))
            content += tensor.numpy().tobytes()
        path.write_bytes(b"head")
        expected[path] = content
    write_tensors(placements, workers)
    assert all(path.read_bytes() == content for path, content in expected.items())


def test_the_first_failure_of_a_thread_is_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lazy_tensor, "_BLOCK_BYTES", 64)
    (tmp_path / "target").touch()
    (tmp_path / "source").write_bytes(bytes(100))
    stored = StoredTensor(tmp_path / "source", 0, torch.float32, (100, 1))
    with pytest.raises(ValueError, match="truncated"):
        write_tensors([Placement(tmp_path / "target", 0, stored)], workers=2)
    assert block_copy.threading.active_count() < 10
