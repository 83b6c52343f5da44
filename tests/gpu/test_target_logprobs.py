"""Chunked log-probs and entropy against float64, and their memory against full logits."""

from __future__ import annotations

import pytest
import torch

from megatron_arpo.actor.target_logprobs import LogitSettings, target_logprobs
from megatron_arpo.bench.memory import peak_bytes_of
from tests.gpu.rows import Recorder

BOUNDS = {torch.float32: 1e-4, torch.bfloat16: 0.03}
"""Nats, and gradients over their largest value: a bf16 logit near 4 is off by up to 0.008."""
TEMPERATURE = 0.8


def problem(num_targets: int, hidden: int, vocab: int, dtype: torch.dtype, device: torch.device) -> tuple[torch.Tensor, ...]:
    """Hidden states [T, 1, h], output weight [V, h], places and targets [N]."""
    generator = torch.Generator().manual_seed(2)
    hidden_T1h = torch.randn(num_targets + 5, 1, hidden, generator=generator).to(device, dtype)
    weight_Vh = (torch.randn(vocab, hidden, generator=generator) / hidden**0.5).to(device, dtype)
    trained_N = torch.randperm(num_targets + 5, generator=generator)[:num_targets].sort().values
    targets_N = torch.randint(0, vocab - 3, (num_targets,), generator=generator)
    return hidden_T1h.requires_grad_(), weight_Vh.requires_grad_(), trained_N.to(device), targets_N.to(device)


def logprob_errors(num_targets: int, hidden: int, vocab: int, chunk: int, dtype: torch.dtype, device: torch.device) -> dict[str, float]:
    """Of log-probs and entropies in nats; of the gradients of hidden states and output weight over their largest value. The last
    three rows of the vocabulary are padding."""
    hidden_T1h, weight_Vh, trained_N, targets_N = problem(num_targets, hidden, vocab, dtype, device)
    settings = LogitSettings(vocab_size=vocab - 3, chunk_tokens=chunk, sequence_parallel=False)
    logprobs_N, entropy_N = target_logprobs(hidden_T1h, weight_Vh, trained_N, targets_N, TEMPERATURE, settings)
    towards_N = torch.linspace(-1.0, 1.0, num_targets, device=device)
    grads = torch.autograd.grad(logprobs_N, [hidden_T1h, weight_Vh], towards_N)

    exact = [one.detach().double().requires_grad_() for one in (hidden_T1h, weight_Vh)]
    every_NV = (exact[0][:, 0][trained_N] @ exact[1][: vocab - 3].t() / TEMPERATURE).log_softmax(-1)
    expected_N = every_NV.gather(1, targets_N[:, None])[:, 0]
    expected_grads = torch.autograd.grad(expected_N, exact, towards_N.double())
    expected_entropy_N = -(every_NV.detach().exp() * every_NV.detach()).sum(-1)
    found = {
        "log-probs": float((logprobs_N.detach() - expected_N.detach()).abs().max()),
        "entropies": float((entropy_N - expected_entropy_N).abs().max()),
    }
    for name, grad, expected in zip(("gradient of hidden", "gradient of weight"), grads, expected_grads, strict=True):
        found[name] = float((grad.double() - expected).abs().max() / expected.abs().max())
    return found


def peak_bytes(num_targets: int, hidden: int, vocab: int, chunk: int, device: torch.device) -> tuple[int, int]:
    """(chunked, with full logits), forward and backward in bf16."""
    hidden_T1h, weight_Vh, trained_N, targets_N = problem(num_targets, hidden, vocab, torch.bfloat16, device)
    settings = LogitSettings(vocab_size=vocab, chunk_tokens=chunk, sequence_parallel=False)

    def chunked() -> None:
        logprobs_N, _ = target_logprobs(hidden_T1h, weight_Vh, trained_N, targets_N, 1.0, settings)
        torch.autograd.grad(logprobs_N.sum(), [hidden_T1h, weight_Vh])

    def full() -> None:
        every_NV = (hidden_T1h[:, 0][trained_N] @ weight_Vh.t()).float().log_softmax(-1)
        torch.autograd.grad(every_NV.gather(1, targets_N[:, None]).sum(), [hidden_T1h, weight_Vh])

    return peak_bytes_of(chunked), peak_bytes_of(full)


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
def test_chunked_logprobs_are_exact(record: Recorder, device: torch.device, dtype: torch.dtype) -> None:
    sizes = (700, 3584, 152_064, 256) if device.type == "cuda" else (50, 32, 200, 16)
    for name, error in logprob_errors(*sizes, dtype, device).items():
        record(f"target {name}, {str(dtype).removeprefix('torch.')}: error to float64", error, at_most=BOUNDS[dtype])


def test_chunked_logprobs_save_memory(record: Recorder, device: torch.device) -> None:
    sizes = (8192, 3584, 152_064, 1024) if device.type == "cuda" else (512, 32, 4096, 64)
    chunked, full = peak_bytes(*sizes, device)
    note = f"{chunked / 2**30:.2f} of {full / 2**30:.2f} GiB, {sizes[0]} targets"
    record("target log-probs, peak memory over full logits", chunked / full, at_most=0.5, of_card=True, note=note)
