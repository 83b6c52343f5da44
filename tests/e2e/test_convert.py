"""`convert` as a user runs it: there and back, differences found, and nothing half-written by a kill, an interruption or a full disk."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_arpo.bench.random_model import qwen3_config, write_random_model
from megatron_arpo.cli import main
from megatron_arpo.convert.open_source import open_source
from megatron_arpo.convert.verify import compare
from tests.e2e.commands import ROOT, Command, run, small_disk

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """0.3 GB, so that there is something to interrupt."""
    folder = tmp_path_factory.mktemp("large") / "model"
    write_random_model(folder, qwen3_config(num_layers=8, hidden_size=1024, ffn_hidden_size=4096, vocab_size=32_000), workers=2)
    return folder


def is_same(one: Path, other: Path) -> bool:
    return not compare(open_source(one), open_source(other), workers=2, dtype=None).problems


def aside(target: Path) -> Path:
    return target.with_name(f".{target.name}.tmp")


def test_there_and_back(task: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    def call(*arguments: object) -> tuple[int, str]:
        return main(["convert", *map(str, arguments)]), "".join(capsys.readouterr())

    model, megatron, back = task / "model", tmp_path / "megatron", tmp_path / "back"
    code, output = run("convert", "to-megatron", str(model), str(megatron))
    assert code == 0 and f"-> {megatron}: " in output, output
    code, output = run("convert", "to-hf", str(megatron), str(back), "--max-shard-gib", "0.001", "--workers", "3")
    assert code == 0, output
    code, output = call("verify", model, back)
    assert code == 0 and "tensors equal, 0 not" in output, output
    assert AutoTokenizer.from_pretrained(back).decode([5])
    _, loading = AutoModelForCausalLM.from_pretrained(back, output_loading_info=True)
    assert not loading["missing_keys"] and not loading["unexpected_keys"]
    code, output = call("to-hf", megatron, back)
    assert code == 2 and "already there; give a new folder or remove it" in output
    code, output = call("to-hf", megatron, tmp_path / "half", "--dtype", "bfloat16")
    assert code == 0 and '"bfloat16"' in (tmp_path / "half/config.json").read_text()
    code, output = call("verify", tmp_path / "half", model)
    assert code == 1 and "torch.bfloat16 and torch.float32" in output
    code, output = call("verify", tmp_path / "half", model, "--dtype", "bfloat16")
    assert code == 0, output


_ONE_TOKEN = """
import sys
from vllm import LLM, SamplingParams
if __name__ == "__main__":
    engine = LLM(model=sys.argv[1], max_model_len=64, enforce_eager=True)
    found = engine.generate({"prompt_token_ids": [5, 6, 7]}, SamplingParams(max_tokens=1, temperature=0, logprobs=1))[0].outputs[0]
    ((token, logprob),) = ((token, one.logprob) for token, one in found.logprobs[0].items() if token == found.token_ids[0])
    open(sys.argv[2], "w").write(f"{token} {logprob}")
"""


def test_vllm_loads_the_shards(task: Path, tmp_path: Path) -> None:
    pytest.importorskip("vllm")
    from transformers import AutoModelForCausalLM

    assert main(["convert", "to-megatron", str(task / "model"), str(tmp_path / "megatron")]) == 0
    assert main(["convert", "to-hf", str(tmp_path / "megatron"), str(tmp_path / "hf"), "--max-shard-gib", "0.001"]) == 0
    (tmp_path / "one_token.py").write_text(_ONE_TOKEN)
    found = subprocess.run(
        [sys.executable, str(tmp_path / "one_token.py"), str(tmp_path / "hf"), str(tmp_path / "found")],
        capture_output=True, text=True, timeout=200,
        env={**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert found.returncode == 0, found.stderr[-3000:]
    token, logprob = (tmp_path / "found").read_text().split()
    logits = AutoModelForCausalLM.from_pretrained(task / "model", dtype="auto")(torch.tensor([[5, 6, 7]])).logits[0, -1].float()
    assert logits.argmax() == int(token)
    assert logits.log_softmax(-1)[int(token)].item() == pytest.approx(float(logprob), abs=0.02)


def test_verify_lists_what_differs(task: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(task / "model", other)
    tensors = load_file(other / "model.safetensors")
    tensors["model.norm.weight"][3] += 0.25
    tensors["model.layers.0.mlp.up_proj.weight"] = tensors["model.layers.0.mlp.up_proj.weight"][:-1].clone()
    del tensors["model.layers.1.input_layernorm.weight"]
    save_file(tensors | {"more": torch.ones(2)}, other / "model.safetensors")
    code, output = run("convert", "verify", str(task / "model"), str(other))
    assert code == 1 and "Traceback" not in output
    lines = output.splitlines()
    assert "model.norm.weight: differs by up to 0.25" in lines
    assert f"model.layers.1.input_layernorm.weight: missing in {other}" in lines
    assert f"more: missing in {task / 'model'}" in lines
    assert any(line.startswith("model.layers.0.mlp.up_proj.weight: shapes (") for line in lines)
    assert f"{len(tensors) - 2} tensors equal, 4 not" in lines[-1]


def test_the_script_is_the_command(task: Path) -> None:
    found = subprocess.run(
        [sys.executable, str(ROOT / "tools/convert.py"), "verify", str(task / "model"), str(task / "model")],
        cwd="/", capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert found.returncode == 0 and "tensors equal, 0 not" in found.stdout, found.stderr


@pytest.mark.parametrize("kind", ["to-megatron", "to-hf"])
def test_killed_half_way(large: Path, kind: str, tmp_path: Path) -> None:
    """SIGKILL at random moments, then to the end: what is there is there whole, and what a kill left is replaced."""
    target, draw, num_killed = tmp_path / "target", random.Random(3), 0
    for _ in range(4):
        command = Command("convert", kind, str(large), str(target), "--workers", "1")
        try:
            command.wait_until(aside(target).exists, 60, "a folder aside")
            time.sleep(0.2 * draw.random())
            command.kill_hard()
        finally:
            command.sweep()
        if target.exists():
            assert is_same(large, target)
            shutil.rmtree(target)
        else:
            num_killed += 1
            assert aside(target).exists()
    assert num_killed, "no kill came in time"
    code, output = run("convert", kind, str(large), str(target))
    assert code == 0, output
    assert is_same(large, target) and [one.name for one in tmp_path.iterdir()] == ["target"]


def test_interrupted_half_way(large: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    for _ in range(5):
        command = Command("convert", "to-hf", str(large), str(target), "--workers", "1")
        try:
            command.wait_until(aside(target).exists, 60, "a folder aside")
            command.process.send_signal(signal.SIGINT)
            code = command.finish(30)
        finally:
            command.sweep()
        if code:
            break
        shutil.rmtree(target)  # it was through already
    assert code == 130 and "Traceback" not in command.output
    assert command.output.strip() == "megatron-arpo: interrupted; nothing was left behind, start the same command again"
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("kind", ["to-megatron", "to-hf"])
def test_a_full_disk(large: Path, kind: str, tmp_path: Path) -> None:
    """Both where the room can be seen to be too small, and where it runs out on the way."""
    with small_disk(tmp_path / "small", 400) as small:
        (small / "other").write_bytes(bytes(200 << 20))
        code, output = run("convert", kind, str(large), str(small / "target"))
        assert code == 2 and "200 MiB free and " in output and "Traceback" not in output, output
        (small / "other").unlink()
        command = Command("convert", kind, str(large), str(small / "target"), "--workers", "1")
        try:
            command.wait_until(aside(small / "target").exists, 60, "a folder aside")
            with open(small / "other", "wb") as file:
                try:
                    while True:
                        file.write(bytes(1 << 20))
                except OSError:
                    pass
            code = command.finish(60)
        finally:
            command.sweep()
        assert code == 2 and "the disk is full" in command.output and "Traceback" not in command.output, command.output
        assert [one.name for one in small.iterdir()] == ["other"]
