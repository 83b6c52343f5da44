"""A configuration that asks for kernels this machine has not is refused in one sentence, on CPU and on CUDA devices of any age."""

from __future__ import annotations

import pytest
import torch

from megatron_arpo.actor import kernels
from megatron_arpo.actor.kernels import check_kernels, fp8_obstacle, layer_implementation
from megatron_arpo.config.actor import ActorSettings


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A machine with a Hopper card and Transformer Engine 2.11."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Card")
    monkeypatch.setattr(kernels, "transformer_engine_version", lambda: "2.11.0")
    return monkeypatch


@pytest.fixture
def cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def refusal(**actor: object) -> str:
    with pytest.raises(ValueError) as caught:
        check_kernels(ActorSettings.model_validate(actor))
    return str(caught.value)


def test_fp8_without_a_device(cpu: None) -> None:
    assert refusal(fp8={}) == "actor.fp8.recipe=blockwise: there is no CUDA device; remove actor.fp8 to train in bf16"


def test_transformer_engine_without_a_device(cpu: None) -> None:
    assert refusal(transformer="transformer_engine") == "actor.transformer=transformer_engine: there is no CUDA device; use auto or local"


def test_offload_without_a_device(cpu: None) -> None:
    said = refusal(optimizer={"cpu_offload_fraction": 0.5})
    assert said == "actor.optimizer.cpu_offload_fraction moves state off a CUDA device, and there is none; set it to 0"


def test_what_a_machine_without_a_device_can_run(cpu: None) -> None:
    assert layer_implementation(ActorSettings()) == "local"


def test_fp8_in_layers_that_have_none(cuda: pytest.MonkeyPatch) -> None:
    said = refusal(transformer="local", fp8={})
    assert said == "actor.fp8 runs in Transformer Engine's layers, but actor.transformer=local; use auto or transformer_engine"


def test_transformer_engine_that_is_not_installed(cuda: pytest.MonkeyPatch) -> None:
    cuda.setattr(kernels, "transformer_engine_version", lambda: None)
    install = "pip install --no-build-isolation 'transformer-engine[pytorch]==2.11.0'"
    assert refusal(fp8={}) == (
        f"actor.fp8.recipe=blockwise: Transformer Engine is not installed ({install}); remove actor.fp8 to train in bf16"
    )
    assert refusal(transformer="transformer_engine").startswith(
        f"actor.transformer=transformer_engine: Transformer Engine is not installed ({install})"
    )
    assert layer_implementation(ActorSettings()) == "local"


@pytest.mark.parametrize("version", ["2.8.1", "2.12.0", "1.13"])
def test_transformer_engine_of_another_version(cuda: pytest.MonkeyPatch, version: str) -> None:
    cuda.setattr(kernels, "transformer_engine_version", lambda: version)
    assert f"Transformer Engine {version} is installed, >=2.9,<2.12 is needed" in refusal(fp8={})


def test_recipes_of_a_hopper_card(cuda: pytest.MonkeyPatch) -> None:
    assert [recipe for recipe in kernels.LEAST_CAPABILITY if fp8_obstacle(recipe) is None] == ["tensorwise", "delayed", "blockwise"]
    assert refusal(fp8={"recipe": "mxfp8"}) == (
        "actor.fp8.recipe=mxfp8: Card has compute capability 9.0, it needs 10.0; remove actor.fp8 to train in bf16"
    )
    assert layer_implementation(ActorSettings(fp8={})) == "transformer_engine"


def test_recipes_of_older_cards(cuda: pytest.MonkeyPatch) -> None:
    cuda.setattr(torch.cuda, "get_device_capability", lambda: (8, 9))
    assert [recipe for recipe in kernels.LEAST_CAPABILITY if fp8_obstacle(recipe) is None] == ["tensorwise", "delayed"]
    cuda.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    assert [recipe for recipe in kernels.LEAST_CAPABILITY if fp8_obstacle(recipe) is None] == []
