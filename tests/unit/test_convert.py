"""Opening, checking and comparing checkpoints: what is wrong with them is said in one sentence, and no target is left behind."""

from __future__ import annotations

import io
import json
import math
import pickle
from pathlib import Path
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

from megatron_arpo.bench.random_model import qwen3_config, write_random_model
from megatron_arpo.convert.command import convert, verify
from megatron_arpo.convert.compare import largest_difference
from megatron_arpo.convert.fuse import fused, split
from megatron_arpo.convert.open_source import open_source
from megatron_arpo.convert.saved_files import SavedTensor, load_without_bytes, stored_tensor
from megatron_arpo.families.architecture import Architecture, Experts
from megatron_arpo.families.names import to_megatron
from megatron_arpo.families.parameters import all_parameters, hf_shapes
from megatron_arpo.weights.lazy_tensor import HeldTensor, read_whole

CONFIG = qwen3_config(num_layers=2, hidden_size=256, ffn_hidden_size=48, vocab_size=70)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    write_random_model(tmp_path / "model", CONFIG, workers=1)
    return tmp_path / "model"


def run(kind: str, source: Path, target: Path, **options) -> None:
    convert(kind, source, target, **{"hf_config": None, "workers": 2, "max_shard_gib": 1.0, "dtype": None} | options)


def change(model: Path, **tensors: torch.Tensor | None) -> None:
    """Replaces, adds or takes out (None) tensors; two underscores in a name stand for a point."""
    path = model / "model.safetensors"
    found = load_file(path) | {name.replace("__", "."): tensor for name, tensor in tensors.items()}
    save_file({name: tensor for name, tensor in found.items() if tensor is not None}, path)


@pytest.mark.parametrize("kind", ["to-hf", "to-megatron"])
@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"model__norm__weight": None}, r"tensor model\.norm\.weight is missing; the checkpoint is not whole"),
        ({"more": torch.ones(1)}, r"tensor more is not part of a qwen3 model with this config\.json"),
        ({"model__norm__weight": torch.ones(3)}, r"tensor model\.norm\.weight has shape \(3,\), config\.json asks for \(256,\)"),
        ({"lm_head__weight": torch.ones(70, 256, dtype=torch.bfloat16)}, r"lm_head\.weight differs from .* by up to .*tie_word_embeddings"),
    ],
)
def test_a_source_that_is_not_the_model_is_refused(model: Path, tmp_path: Path, kind: str, changed: dict, said: str) -> None:
    change(model, **changed)
    with pytest.raises(ValueError, match=said):
        run(kind, model, tmp_path / "target")
    assert sorted(one.name for one in tmp_path.iterdir()) == ["model"]


def test_an_output_layer_that_is_the_embedding_is_left_out(model: Path, tmp_path: Path) -> None:
    change(model, lm_head__weight=load_file(model / "model.safetensors")["model.embed_tokens.weight"].clone())
    change(model, model__layers__0__self_attn__rotary_emb__inv_freq=torch.ones(64))
    run("to-hf", model, tmp_path / "target")
    assert set(load_file(tmp_path / "target/model.safetensors")) == {
        name for one in all_parameters(open_source(model).architecture) for name in one.hf_names
    }


def test_layers_of_several_dtypes_need_one_for_megatron(model: Path, tmp_path: Path) -> None:
    change(model, model__layers__1__mlp__down_proj__weight=torch.ones(256, 48))
    with pytest.raises(ValueError, match=r"mlp\.linear_fc2\.weight is torch.bfloat16 in one layer and torch.float32 in another.*--dtype"):
        run("to-megatron", model, tmp_path / "target")
    run("to-megatron", model, tmp_path / "target", dtype="bfloat16")
    run("to-hf", model, tmp_path / "hf")
    assert load_file(tmp_path / "hf/model.safetensors")["model.layers.1.mlp.down_proj.weight"].dtype == torch.float32


@pytest.mark.parametrize("kind", ["to-hf", "to-megatron"])
def test_truncated_sources(model: Path, tmp_path: Path, kind: str) -> None:
    run("to-megatron", model, tmp_path / "megatron")
    with open(model / "model.safetensors", "r+b") as file:
        file.truncate(5000)
    with pytest.raises(ValueError, match=r"model\.safetensors: cannot read the weights"):
        run(kind, model, tmp_path / "target")
    weights = tmp_path / "megatron/weights"
    with open(weights / "__0_1.distcp", "r+b") as file:
        file.truncate(5000)
    with pytest.raises(ValueError, match=r"__0_1\.distcp: has 5000 of \d+ bytes; the file is truncated"):
        run(kind, tmp_path / "megatron", tmp_path / "target")
    (weights / "__0_1.distcp").unlink()
    with pytest.raises(ValueError, match=r"__0_1\.distcp is missing"):
        run(kind, tmp_path / "megatron", tmp_path / "target")
    (weights / ".metadata").write_bytes(b"damaged")
    with pytest.raises(ValueError, match=r"\.metadata: cannot be read .*damaged"):
        run(kind, tmp_path / "megatron", tmp_path / "target")
    assert not list(tmp_path.glob("*target*"))


def test_a_chunk_that_is_damaged(model: Path, tmp_path: Path) -> None:
    run("to-megatron", model, tmp_path / "megatron", workers=1)
    (path,) = (tmp_path / "megatron/weights").glob("*.distcp")
    path.write_bytes(bytes(path.stat().st_size))
    with pytest.raises(ValueError, match=r"__0_0\.distcp: cannot be read .*damaged"):
        run("to-hf", tmp_path / "megatron", tmp_path / "target")


def test_folders_of_no_known_kind(model: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="empty: not a checkpoint; give a Hugging Face folder"):
        open_source(tmp_path / "empty")
    with pytest.raises(ValueError, match="nowhere: no such folder"):
        open_source(tmp_path / "nowhere")
    (tmp_path / "empty/checkpoints").mkdir()
    with pytest.raises(ValueError, match="the run has no finished checkpoint yet"):
        open_source(tmp_path / "empty")
    run("to-megatron", model, tmp_path / "megatron")
    with pytest.raises(ValueError, match="a bare torch_dist folder does not say of which model it is; add --hf-config"):
        open_source(tmp_path / "megatron/weights")
    assert open_source(tmp_path / "megatron/weights", model).kind == "Megatron dist-checkpoint"
    (model / "config.json").unlink()
    with pytest.raises(ValueError, match=r"model: has no config\.json; name the folder"):
        open_source(model)
    with pytest.raises(ValueError, match="megatron: already there"):
        run("to-megatron", model, tmp_path / "megatron")


def test_a_config_of_another_model(model: Path, tmp_path: Path) -> None:
    run("to-megatron", model, tmp_path / "megatron")
    path = tmp_path / "megatron/hf/config.json"
    path.write_text(json.dumps(CONFIG | {"intermediate_size": 64}))
    with pytest.raises(ValueError, match=r"should make a tensor of shape \(128, 256\) by config\.json, found \(96, 256\)"):
        open_source(tmp_path / "megatron")
    path.write_text(json.dumps(CONFIG | {"num_hidden_layers": 3}))
    with pytest.raises(ValueError, match=r"layer_norm_weight is of 2 layers \(and experts\), config\.json has 3"):
        open_source(tmp_path / "megatron")
    path.write_text(json.dumps(CONFIG | {"model_type": "llama"}))
    with pytest.raises(ValueError, match=r"decoder\.layers\.self_attention\.q_layernorm\.weight is not part of a llama model"):
        open_source(tmp_path / "megatron")


def test_the_megatron_checkpoint_is_what_torch_reads(model: Path, tmp_path: Path) -> None:
    """Every chunk with torch.load, and the keys' shapes."""
    run("to-megatron", model, tmp_path / "megatron", max_shard_gib=0.0003)
    weights = tmp_path / "megatron/weights"
    metadata = FileSystemReader(str(weights)).read_metadata()
    tensors = {name: entry for name, entry in metadata.state_dict_metadata.items() if isinstance(entry, TensorStorageMetadata)}
    assert tensors["embedding.word_embeddings.weight"].size == (128, 256)
    assert tensors["decoder.layers.mlp.linear_fc1.weight"].size == (2, 96, 256)
    assert len(list(weights.glob("*.distcp"))) >= 2
    source = load_file(model / "model.safetensors")
    for index, place in metadata.storage_data.items():
        raw = (weights / place.relative_path).read_bytes()[place.offset : place.offset + place.length]
        found = torch.load(io.BytesIO(raw), weights_only=True)
        if "_extra_state" in index.fqn:
            assert found == [None]
        if index.fqn == "decoder.layers.mlp.linear_fc1.weight":
            layer = f"model.layers.{index.offset[0]}.mlp"
            whole = torch.cat([source[f"{layer}.gate_proj.weight"], source[f"{layer}.up_proj.weight"]])
            assert torch.equal(found, whole[None]) and found.untyped_storage().nbytes() == whole.nbytes
        if index.fqn == "embedding.word_embeddings.weight":
            assert torch.equal(found[:70], source["model.embed_tokens.weight"]) and not found[70:].any()


def test_layers_that_are_kept_each_by_itself(model: Path, tmp_path: Path) -> None:
    """As Megatron names them where layers may differ, which verl asks for in mixtures of experts."""
    run("to-megatron", model, tmp_path / "megatron")
    path = tmp_path / "megatron/weights/.metadata"
    metadata = pickle.loads(path.read_bytes())
    for key in [key for key in metadata.state_dict_metadata if key.startswith("decoder.layers.") and "_extra_state" not in key]:
        entry = metadata.state_dict_metadata.pop(key)
        for chunk in entry.chunks:
            own = key.replace("layers.", f"layers.{chunk.offsets[0]}.")
            place = metadata.storage_data.pop(MetadataIndex(key, chunk.offsets))
            chunk.offsets, chunk.sizes = chunk.offsets[1:], chunk.sizes[1:]
            metadata.state_dict_metadata[own] = TensorStorageMetadata(entry.properties, entry.size[1:], [chunk])
            metadata.storage_data[MetadataIndex(own, chunk.offsets)] = place
    path.write_bytes(pickle.dumps(metadata))
    run("to-hf", tmp_path / "megatron", tmp_path / "hf")
    assert verify(model, tmp_path / "hf", hf_config=None, workers=1, dtype=None)


@pytest.mark.parametrize("has_experts", [False, True])
def test_fused_is_the_table_and_split_its_inverse(has_experts: bool) -> None:
    architecture = Architecture(
        family="qwen3_moe" if has_experts else "qwen2", num_layers=1, hidden_size=12, ffn_hidden_size=6, num_heads=4, num_kv_heads=2,
        head_dim=3, vocab_size=130, tied_embeddings=False, norm_eps=1e-6, rope_theta=1e4, max_positions=64, qkv_bias=not has_experts,
        qk_norm=has_experts,
        experts=Experts(num_experts=2, num_active=1, ffn_hidden_size=5, normalize_weights=True) if has_experts else None,
    )  # fmt: skip
    for parameter in all_parameters(architecture):
        shapes = hf_shapes(parameter.name, architecture)
        parts = {name: torch.randn(shape) for name, shape in zip(parameter.hf_names, shapes, strict=True)}
        whole = fused(parameter, {name: HeldTensor(part) for name, part in parts.items()}, architecture)
        expected = to_megatron(parameter.name, parts, architecture, tp=1)
        assert whole.shape == tuple(expected.shape) and torch.equal(read_whole(whole), expected), parameter
        back = split(parameter, whole, architecture)
        assert back.keys() == parts.keys() and all(torch.equal(read_whole(back[name]), part) for name, part in parts.items())


def test_largest_difference() -> None:
    one = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    assert largest_difference(HeldTensor(one), HeldTensor(one.clone())) is None
    assert largest_difference(HeldTensor(one), HeldTensor(one + torch.tensor([0.0, 0.5]))) == 0.5
    assert largest_difference(HeldTensor(one), HeldTensor(one.bfloat16())) == 0.0, "another dtype is a difference"
    assert math.isnan(largest_difference(HeldTensor(one), HeldTensor(one * torch.nan)))
    nans = HeldTensor(one * torch.nan)
    assert largest_difference(nans, nans) is None
    assert largest_difference(HeldTensor(torch.tensor(2.0)), HeldTensor(torch.tensor(2.5))) == 0.5


def test_verify_of_a_tied_model_counts_the_output_layer_as_the_embedding(model: Path, tmp_path: Path, capsys) -> None:
    run("to-hf", model, tmp_path / "other")
    change(tmp_path / "other", lm_head__weight=load_file(model / "model.safetensors")["model.embed_tokens.weight"].clone())
    assert verify(model, tmp_path / "other", hf_config=None, workers=1, dtype=None)
    change(tmp_path / "other", lm_head__weight=torch.zeros(70, 256, dtype=torch.bfloat16))
    assert not verify(model, tmp_path / "other", hf_config=None, workers=1, dtype=None)
    assert "lm_head.weight: differs by up to" in capsys.readouterr().out


def test_tensors_of_torch_save_are_found_without_reading_them(tmp_path: Path) -> None:
    path = tmp_path / "saved.pt"
    tensors = [{"a": torch.randn(5, 3).bfloat16(), "b": torch.arange(12.0)[4:8], "state": io.BytesIO(b"state")}]
    with mock.patch.object(torch.serialization, "location_tag", lambda storage: "cuda:0"):  # as ranks on cards save them
        torch.save(tensors, path)
    found = load_without_bytes(path)[0]
    for name in ("a", "b"):
        assert torch.equal(read_whole(stored_tensor(path, found[name])), tensors[0][name])
    torch.save(torch.randn(4, 6).T, path)
    with pytest.raises(ValueError, match=r"shape \(6, 4\) with strides \(1, 6\); only contiguous"):
        stored_tensor(path, load_without_bytes(path))
    torch.save({"a": Path}, path)
    with pytest.raises(ValueError, match=r"saved\.pt: holds a pathlib\.Path; only tensors"):
        load_without_bytes(path)
    path.write_bytes(path.read_bytes()[:-30])
    with pytest.raises(ValueError, match=r"saved\.pt: cannot be read .*truncated or damaged"):
        load_without_bytes(path)


def test_a_saved_tensor_that_is_not_what_the_metadata_says(tmp_path: Path) -> None:
    path = tmp_path / "part.distcp"
    buffer = io.BytesIO()
    torch.save(torch.ones(2, 3), buffer)
    path.write_bytes(b"before" + buffer.getvalue() + b"behind")
    length = len(buffer.getvalue())
    assert read_whole(SavedTensor(path, 6, length, torch.float32, (2, 3))).sum() == 6
    with pytest.raises(ValueError, match=r"part\.distcp: holds a tensor of torch\.float32"):
        read_whole(SavedTensor(path, 6, length, torch.bfloat16, (2, 3)))


@pytest.mark.parametrize(
    ("ranks", "said"),
    [
        ([(0, 0), (1, 1)], "the file of tensor-parallel rank 0, pipeline stage 1 is missing"),
        ([(0, 0, 0)], "expert-parallel ranks are not supported"),
    ],
)
def test_verl_ranks_that_are_missing(model: Path, tmp_path: Path, ranks: list[tuple[int, ...]], said: str) -> None:
    for rank in ranks:
        folder = tmp_path / "actor/model" / ("mp_rank_" + "_".join(f"{one:0{2 + bool(place)}d}" for place, one in enumerate(rank)))
        folder.mkdir(parents=True)
        torch.save([{}], folder / "model.pt")
    with pytest.raises(ValueError, match=said):
        open_source(tmp_path, model)


def test_verl_fsdp_of_two_world_sizes(model: Path, tmp_path: Path) -> None:
    for name in ("model_world_size_1_rank_0.pt", "model_world_size_2_rank_0.pt"):
        torch.save({}, tmp_path / name)
    with pytest.raises(ValueError, match="has ranks of world sizes 1 and 2"):
        open_source(tmp_path, model)


def test_verl_fsdp_of_one_rank_has_plain_tensors(model: Path, tmp_path: Path) -> None:
    torch.save(load_file(model / "model.safetensors"), tmp_path / "model_world_size_1_rank_0.pt")
    run("to-hf", tmp_path, tmp_path / "hf", hf_config=model)
    assert verify(model, tmp_path / "hf", hf_config=None, workers=1, dtype=None)


def test_parts_of_two_dtypes_are_refused() -> None:
    architecture = Architecture(
        family="qwen2", num_layers=1, hidden_size=12, ffn_hidden_size=6, num_heads=4, num_kv_heads=2, head_dim=3, vocab_size=130,
        tied_embeddings=False, norm_eps=1e-6, rope_theta=1e4, max_positions=64, qkv_bias=False, qk_norm=False,
    )  # fmt: skip
    parameter = next(one for one in all_parameters(architecture) if "linear_qkv.weight" in one.name)
    shapes = hf_shapes(parameter.name, architecture)
    dtypes = (torch.bfloat16, torch.float32, torch.float32)
    parts = {
        name: HeldTensor(torch.zeros(shape, dtype=dtype)) for name, shape, dtype in zip(parameter.hf_names, shapes, dtypes, strict=True)
    }
    with pytest.raises(ValueError, match=r"q_proj.weight is torch.bfloat16.*k_proj.weight is torch.float32.*add --dtype"):
        fused(parameter, parts, architecture)
