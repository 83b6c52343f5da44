"""The Hugging Face folders that are written are what the safetensors library reads, and damaged ones are named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file

from megatron_arpo.weights.aside import written_aside
from megatron_arpo.weights.hf_folder import write_hf_folder
from megatron_arpo.weights.lazy_tensor import HeldTensor, read_whole
from megatron_arpo.weights.safetensors_folder import stored_tensors, tensor_reader

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.uint8)


@pytest.fixture
def config(tmp_path: Path) -> Path:
    (tmp_path / "config").mkdir()
    (tmp_path / "config/config.json").write_text('{"model_type": "qwen3", "dtype": "float32"}')
    (tmp_path / "config/tokenizer.json").write_text("{}")
    return tmp_path / "config"


def random_tensors(seed: int, num_tensors: int) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    found = {}
    for index in range(num_tensors):
        shape = torch.randint(1, 9, (1 + index % 2,), generator=draw).tolist()
        found[f"tensor.{index}"] = torch.randint(0, 100, shape, generator=draw).to(DTYPES[(seed + index) % len(DTYPES)])
    return found


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10**6), num_tensors=st.integers(1, 8), max_bytes=st.integers(1, 400))
def test_any_tensors_in_any_shards(tmp_path_factory: pytest.TempPathFactory, seed: int, num_tensors: int, max_bytes: int) -> None:
    folder = tmp_path_factory.mktemp("folder")
    (folder / "config.json").write_text("{}")
    tensors = random_tensors(seed, num_tensors)
    write_hf_folder(folder / "hf", {name: HeldTensor(one) for name, one in tensors.items()}, folder, max_shard_bytes=max_bytes, workers=2)
    files = sorted((folder / "hf").glob("*.safetensors"))
    found = {}
    for path in files:
        with safe_open(path, framework="pt") as shard:
            held = {name: shard.get_tensor(name) for name in shard.keys()}  # noqa: SIM118 not iterable itself
        assert len(held) == 1 or sum(one.nbytes for one in held.values()) <= max_bytes
        found |= held
    ours = stored_tensors(folder / "hf")
    assert found.keys() == tensors.keys() == ours.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor)
        assert torch.equal(read_whole(ours[name]), tensor) and ours[name].offset % tensor.dtype.itemsize == 0
    if len(files) > 1:
        index = json.loads((folder / "hf/model.safetensors.index.json").read_text())
        assert index["metadata"]["total_size"] == sum(one.nbytes for one in tensors.values())
        assert set(index["weight_map"].values()) == {path.name for path in files}


def test_config_and_tokenizer_come_along_and_the_dtype_is_the_tensors(config: Path, tmp_path: Path) -> None:
    write_hf_folder(tmp_path / "hf", {"a": HeldTensor(torch.ones(3, dtype=torch.bfloat16))}, config)
    assert json.loads((tmp_path / "hf/config.json").read_text()) == {"model_type": "qwen3", "dtype": "bfloat16"}
    assert (tmp_path / "hf/tokenizer.json").exists() and [one.name for one in (tmp_path / "hf").glob("*.safetensors")] == [
        "model.safetensors"
    ]


def test_a_folder_is_replaced_whole_or_not_at_all(config: Path, tmp_path: Path) -> None:
    target = tmp_path / "hf"
    write_hf_folder(target, {"a": HeldTensor(torch.ones(3))}, config)

    class Broken(HeldTensor):
        def read_rows(self, start: int, out: torch.Tensor) -> None:
            raise ValueError("no such rows")

    with pytest.raises(ValueError, match="no such rows"):
        write_hf_folder(target, {"a": Broken(torch.zeros(3))}, config, replace=True)
    assert tensor_reader(target)("a").tolist() == [1, 1, 1] and not (tmp_path / ".hf.tmp").exists()
    (tmp_path / ".hf.tmp").mkdir()  # what a kill leaves
    (tmp_path / ".hf.tmp/model.safetensors").touch()
    write_hf_folder(target, {"a": HeldTensor(torch.zeros(3))}, config, replace=True)
    assert tensor_reader(target)("a").tolist() == [0, 0, 0] and not list(tmp_path.glob(".hf.*"))


def test_what_came_to_be_at_the_target_is_left_alone(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="something came to be there"), written_aside(tmp_path / "target", 0):
        (tmp_path / "target").mkdir()
        (tmp_path / "target/theirs").touch()
    assert [one.name for one in tmp_path.iterdir()] == ["target"] and (tmp_path / "target/theirs").exists()


def test_a_target_that_leads_up_again_does_not_take_its_parent(tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "here/mine").touch()
    with pytest.raises(ValueError, match="something came to be there"), written_aside(tmp_path / "here/new/..", 0):
        pass
    assert (tmp_path / "here/mine").exists()


def test_two_writers_of_one_folder(tmp_path: Path) -> None:
    with written_aside(tmp_path / "target", 0) as aside:
        (aside / "file").touch()
        with (
            pytest.raises(ValueError, match="target: another process is writing it"),
            written_aside(tmp_path / "target", 0),
        ):
            pass
    assert (tmp_path / "target/file").exists()


def test_no_room(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"MiB free and \d+ MiB are needed"), written_aside(tmp_path / "target", 1 << 60):
        pass
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda path: path.unlink(), r"weight file .*model\.safetensors is missing"),
        (lambda path: path.write_bytes(path.read_bytes()[:-1]), r"it has \d+ of \d+ bytes\); the file is truncated"),
        (lambda path: path.write_bytes(path.read_bytes()[:20]), "its header goes past its end"),
        (lambda path: path.write_bytes(b""), "its header goes past its end"),
        (lambda path: path.write_bytes((8).to_bytes(8, "little") + b"not json"), "cannot read the weights .*damaged"),
        (lambda path: path.write_bytes(path.read_bytes().replace(b'"F32"', b'"F99"')), "tensor a has dtype F99, use one of"),
        (lambda path: path.write_bytes(path.read_bytes().replace(b"[2,3]", b"[2,4]")), r"tensor a of shape \(2, 4\) has 24 bytes"),
    ],
)
def test_damaged_weights_are_named(tmp_path: Path, damage, said: str) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.ones(2, 3)}, path)
    damage(path)
    with pytest.raises(ValueError, match=said):
        stored_tensors(tmp_path)


def test_a_damaged_index_and_a_tensor_in_two_shards(tmp_path: Path) -> None:
    index = tmp_path / "model.safetensors.index.json"
    index.write_text("[]")
    with pytest.raises(ValueError, match=r"index\.json: damaged"):
        stored_tensors(tmp_path)
    index.write_text(json.dumps({"weight_map": {"a": "1.safetensors", "b": "2.safetensors"}}))
    for name in ("1", "2"):
        save_file({"a": torch.ones(1)}, tmp_path / f"{name}.safetensors")
    with pytest.raises(ValueError, match=r"tensor a is also in 1\.safetensors"):
        stored_tensors(tmp_path)
