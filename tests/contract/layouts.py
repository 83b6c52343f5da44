"""Launches tests/contract/actor_ranks.py in every layout over gloo and compares what it found with one process.

`python -m tests.contract.layouts` prints the parity table.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch

from megatron_arpo.config.actor import LayoutSettings
from tests.contract.actor_ranks import run_rank

_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(["tests.contract.actor_ranks"])  # ranks begin with Megatron imported, which takes seconds
VOCABULARY = 301  # divides by nothing: padding is at work
LAYOUTS: dict[str, dict] = {
    "1": {},
    "TP2": {"tp": 2},
    "PP2": {"pp": 2},
    "VPP2": {"pp": 2, "vpp": 2},
    "DP2": {"dp": 2},
    "CP2": {"cp": 2},
    "EP2": {"dp": 2, "ep": 2},
    "TP2xPP2": {"tp": 2, "pp": 2},
    "TP2xSP": {"tp": 2, "sequence_parallel": True},
    "CP2xTP2": {"cp": 2, "tp": 2},
    "TP2xSP, EP2": {"tp": 2, "sequence_parallel": True, "ep": 2},
    "TP2xSP, ETP2": {"tp": 2, "sequence_parallel": True, "etp": 2},
    "PP2xEP2": {"pp": 2, "dp": 2, "ep": 2},
}
RECOMPUTE = {"PP2": {"granularity": "full"}, "TP2xSP": {"granularity": "selective", "modules": ["core_attn", "mlp"]}}
"""Layouts that are run with recomputation, which must change nothing."""
TREES_IN = {"1": ["qwen3", "qwen3_moe"], "TP2": ["qwen3"], "PP2": ["qwen3"], "CP2": ["qwen3"]}
CHECKPOINT_FROM = {
    "TP2": "1",
    "PP2": "TP2",
    "VPP2": "PP2",
    "DP2": "PP2",
    "CP2": "DP2",
    "TP2xPP2": "CP2",
    "TP2xSP": "VPP2",
    "CP2xTP2": "TP2",
    "TP2xSP, EP2": "EP2",
    "PP2xEP2": "TP2xSP, EP2",
}


def families_of(name: str) -> list[str]:
    """The first is used for checkpoints."""
    layout = LAYOUTS[name]
    if layout.get("ep", 1) * layout.get("etp", 1) > 1:
        return ["qwen3_moe"]
    dense = ["qwen3", "qwen2", "llama"]
    return dense if layout.get("tp", 1) > 1 else [*dense, "qwen3_moe"]


def make_models(folder: Path) -> dict[str, Path]:
    from transformers import (
        LlamaConfig,
        LlamaForCausalLM,
        Qwen2Config,
        Qwen2ForCausalLM,
        Qwen3Config,
        Qwen3ForCausalLM,
        Qwen3MoeConfig,
        Qwen3MoeForCausalLM,
    )

    common = dict(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=96, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=256, initializer_range=0.06,
    )  # fmt: skip
    llama_rope = {
        "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    }  # fmt: skip
    experts = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, norm_topk_prob=True)
    kinds = {
        "qwen2": (Qwen2ForCausalLM, Qwen2Config(**common, tie_word_embeddings=False)),
        "qwen3": (Qwen3ForCausalLM, Qwen3Config(**common, head_dim=24, tie_word_embeddings=True)),
        "llama": (LlamaForCausalLM, LlamaConfig(**common, tie_word_embeddings=False, rope_parameters=llama_rope)),
        "qwen3_moe": (Qwen3MoeForCausalLM, Qwen3MoeConfig(**common, **experts, head_dim=24, tie_word_embeddings=False)),
    }
    found = {}
    for family, (kind, config) in kinds.items():
        torch.manual_seed(5)
        model = kind(config).float()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.dim() == 1:  # norms and biases start at 1 and 0, which would hide a mix-up
                    parameter.add_(0.1 * torch.randn_like(parameter))
                if name.endswith(("embed_tokens.weight", "lm_head.weight")):
                    parameter.mul_(4.0)  # entropies differ from token to token, as a trained model's do
                if name.endswith("mlp.gate.weight"):
                    parameter.mul_(10.0)  # routes apart, so that rounding decides no tie
        found[family] = folder / family
        model.save_pretrained(found[family])
    return found


def reference_scores(model_path: Path) -> list[float]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    generator = torch.Generator().manual_seed(1)
    found: list[float] = []
    for length in (7, 19, 30):
        ids = torch.randint(0, 300, (length,), generator=generator)
        with torch.no_grad():
            logprobs = model(ids[None]).logits[0].log_softmax(-1)
        found.extend(logprobs[:-1].gather(1, ids[1:, None])[:, 0].tolist())
    return found


class LayoutRuns:
    """Every layout's results, each launched when first asked for."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._models = make_models(folder)
        self._ranks: dict[str, list[dict]] = {}
        self._tensors: dict[str, dict[str, dict[str, dict[str, torch.Tensor]]]] = {}

    def model(self, family: str) -> Path:
        return self._models[family]

    def ranks(self, name: str) -> list[dict]:
        """What each rank found."""
        if name not in self._ranks:
            self._launch(name)
        return self._ranks[name]

    def tensors(self, name: str, family: str) -> dict[str, dict[str, torch.Tensor]]:
        """ "gradients" and "parameters" by Hugging Face name, put together from all ranks."""
        self.ranks(name)
        return self._tensors[name][family]

    def _checkpoint(self, name: str) -> Path:
        return self._folder / f"{name}.checkpoint"

    def _launch(self, name: str) -> None:
        if other := CHECKPOINT_FROM.get(name):
            self.ranks(other)
        job_path = self._folder / f"{name}.json"
        job = {
            "layout": LAYOUTS[name],
            "recompute": RECOMPUTE.get(name),
            "models": {family: str(path) for family, path in self._models.items()},
            "families": families_of(name),
            "tree_families": TREES_IN.get(name, []),
            "checkpoint": str(self._checkpoint(name)),
            "other_checkpoint": str(self._checkpoint(other)) if other else None,
        }
        job_path.write_text(json.dumps(job))
        world_size = LayoutSettings(**LAYOUTS[name]).world_size
        self._ranks[name] = run_ranks(run_rank, world_size, job_path)
        merged: dict[str, dict[str, dict[str, torch.Tensor]]] = {}
        for rank in range(world_size):
            for family, kinds in torch.load(job_path.with_suffix(f".rank{rank}.pt")).items():
                for kind, tensors in kinds.items():
                    known = merged.setdefault(family, {}).setdefault(kind, {})
                    assert not known.keys() & tensors.keys(), "two ranks wrote the same tensor"
                    known.update(tensors)
        self._tensors[name] = merged


def run_ranks(function: Callable[[int, int, Path, Path], None], world_size: int, job_path: Path) -> list[dict]:
    """What each rank found; `function` is the whole of one process and writes it beside the job."""
    logs = [job_path.with_suffix(f".rank{rank}.log") for rank in range(world_size)]
    ranks = [_FORKS.Process(target=function, args=(rank, world_size, job_path, log)) for rank, log in enumerate(logs)]
    for rank in ranks:
        rank.start()
    _wait_for(ranks, timeout_s=200.0)
    assert all(rank.exitcode == 0 for rank in ranks), job_path.stem + "\n".join(log.read_text()[-3000:] for log in logs)
    return [json.loads(job_path.with_suffix(f".rank{rank}").read_text()) for rank in range(world_size)]


def _wait_for(ranks: list[BaseProcess], timeout_s: float) -> None:
    """Until all are through, or one fails."""
    deadline = time.monotonic() + timeout_s
    while any(rank.is_alive() for rank in ranks) and not any(rank.exitcode for rank in ranks) and time.monotonic() < deadline:
        time.sleep(0.1)
    for rank in ranks:
        if rank.is_alive():
            os.kill(rank.pid, signal.SIGABRT)  # its stack goes to the log
        rank.join()


def parity(runs: LayoutRuns, name: str, family: str) -> dict[str, float]:
    """Largest differences of a layout to one process: relative for loss and norm, relative to each tensor's largest value else."""
    one = runs.ranks("1")[0]["parity"][family]
    parts = [rank["parity"][family] for rank in runs.ranks(name) if rank["reports"]]
    found = {"loss": 0.0, "norm": 0.0}
    for update, (loss, norm) in enumerate(one):
        found["loss"] = max(found["loss"], abs(sum(part[update][0] for part in parts) / loss - 1.0))
        found["norm"] = max(found["norm"], *(abs(part[update][1] / norm - 1.0) for part in parts))
    ours, theirs = runs.tensors(name, family), runs.tensors("1", family)
    for kind in ("gradients", "parameters"):
        assert ours[kind].keys() == theirs[kind].keys()
        found[kind] = max(
            float((ours[kind][tensor] - expected).abs().max() / expected.abs().max()) for tensor, expected in theirs[kind].items()
        )
    return found


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        runs = LayoutRuns(Path(folder))
        print(f"{'layout':14} {'family':10} {'loss':>9} {'norm':>9} {'gradients':>9} {'parameters':>10}", flush=True)
        for name in sys.argv[1:] or list(LAYOUTS)[1:]:
            for family in families_of(name):
                found = parity(runs, name, family)
                print(f"{name:14} {family:10} " + " ".join(f"{found[kind]:9.1e}" for kind in found), flush=True)


if __name__ == "__main__":
    main()
