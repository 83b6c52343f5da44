"""The one place that knows whether the actor runs on CUDA or on CPU.

`prepare()` lets unmodified megatron-core 0.16.1 run over gloo on CPU: it answers the calls into torch.cuda that Megatron makes
unasked, and gives its optimizer an Adam whose state can be checkpointed where neither Transformer Engine nor Apex is
installed. Where CUDA exists only the latter applies. Another megatron-core is refused, since the patches are for this one.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.metadata
from typing import Any

import torch
from torch.optim.adam import adam
from torch.optim.adamw import adamw
from torch.overrides import TorchFunctionMode

from megatron_arpo.config.packages import INSTALL_MEGATRON, MEGATRON_VERSION

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4
_CPU = torch.device("cpu")
_TENSOR_TYPE = torch.Tensor.type
_TENSOR_CUDA = torch.Tensor.cuda
_active_mode: list[TorchFunctionMode] = []


def on_cuda() -> bool:
    return torch.cuda.is_available()


def collective_backend() -> str:
    return "nccl" if on_cuda() else "gloo"


def current_device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if on_cuda() else _CPU


def prepare() -> None:
    """Call once in a process, on its main thread, before Megatron builds anything. Raises RuntimeError for another
    megatron-core than the one the patches were written for."""
    found = importlib.metadata.version("megatron-core")
    if found != MEGATRON_VERSION:
        raise RuntimeError(f"megatron-core {found} is installed, this needs {MEGATRON_VERSION}; {INSTALL_MEGATRON}")
    _use_checkpointable_adam()
    if not on_cuda() and not _active_mode:
        _keep_freed_memory()
        torch.compiler.set_stance("force_eager")  # compiling Megatron's small fusions takes longer than it saves on CPU
        _answer_cuda_calls()
        _mend_moe_on_cpu()
        mode = _CudaMeansCpu()
        mode.__enter__()  # for the life of the process, and of this thread only
        _active_mode.append(mode)


def _keep_freed_memory() -> None:
    """glibc would give every freed activation back to the kernel and take fresh pages, zeroed one by one, for the next."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):  # glibc alone has it
        libc.mallopt(_M_MMAP_MAX, 0)
        libc.mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)


class _CudaMeansCpu(TorchFunctionMode):
    """device="cuda" becomes CPU, t.cuda() is t, and t.type() names CUDA types, which Megatron compares with strings."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is _TENSOR_CUDA:
            return args[0]
        if func is _TENSOR_TYPE and len(args) == 1 and not kwargs:
            return _TENSOR_TYPE(args[0]).replace("torch.", "torch.cuda.", 1)
        if _names_cuda(kwargs.get("device")):
            kwargs = {**kwargs, "device": _CPU}
        if kwargs.get("pin_memory"):
            kwargs = {**kwargs, "pin_memory": False}
        return func(*args, **kwargs)


def _names_cuda(device: Any) -> bool:
    if isinstance(device, torch.device):
        return device.type == "cuda"
    return isinstance(device, str) and device.startswith("cuda")


class _NoStream:
    """Stands for every CUDA stream and event: on CPU work is in order already."""

    def __init__(self, *_args: Any, **_kwargs: Any) -> None: ...

    def record_event(self, *_args: Any) -> _NoStream:
        return self

    def _nothing(self, *_args: Any, **_kwargs: Any) -> None: ...

    wait_stream = wait_event = synchronize = record = wait = _nothing


def _answer_cuda_calls() -> None:
    from megatron.core.tensor_parallel import random as megatron_random

    def get_state(*_args: Any, **_kwargs: Any) -> torch.Tensor:
        return torch.get_rng_state()

    def set_state(state: torch.Tensor, *_args: Any, **_kwargs: Any) -> None:
        torch.set_rng_state(state)

    def nothing(*_args: Any, **_kwargs: Any) -> None: ...

    cuda = torch.cuda
    cuda.current_device = lambda: _CPU
    cuda.synchronize = cuda.empty_cache = cuda.set_device = nothing
    cuda.manual_seed = lambda seed: torch.manual_seed(seed) and None
    cuda.get_rng_state = cuda.random.get_rng_state = get_state
    cuda.set_rng_state = cuda.random.set_rng_state = set_state
    cuda.Stream = cuda.Event = _NoStream
    cuda.current_stream = cuda.default_stream = lambda *_args, **_kwargs: _NoStream()
    cuda.stream = lambda _stream: contextlib.nullcontext()
    megatron_random._get_cuda_rng_state = get_state
    megatron_random._set_cuda_rng_state = set_state


def _mend_moe_on_cpu() -> None:
    """Without Transformer Engine megatron-core 0.16.1 leaves a name undefined, and gloo wants split sizes as plain lists."""
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    moe_utils.te_general_gemm = None
    token_dispatcher.maybe_move_tensor_to_cpu = lambda tensor, as_numpy=False, record_stream=False: (
        tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor
    )


class CheckpointableAdam(torch.optim.Optimizer):
    """Torch's Adam with the step kept in the parameter group, as Apex and Transformer Engine keep it.

    Megatron's distributed optimizer can't load a checkpoint of torch's own Adam, which keeps a step for each parameter.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        **_fused_options: Any,
    ) -> None:
        self._update = adamw if adam_w_mode else adam
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "bias_correction": bias_correction})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["step"] = int(group.get("step", 0)) + 1
            params = [param for param in group["params"] if param.grad is not None]
            if not params:
                continue
            for param in params:
                if not self.state[param]:
                    self.state[param] = {"exp_avg": torch.zeros_like(param), "exp_avg_sq": torch.zeros_like(param)}
            self._update(
                params,
                [param.grad for param in params],
                [self.state[param]["exp_avg"] for param in params],
                [self.state[param]["exp_avg_sq"] for param in params],
                [],
                [torch.tensor(float(group["step"] - 1)) for _ in params],  # counted up by the call
                foreach=True,
                capturable=False,
                differentiable=False,
                fused=None,
                grad_scale=None,
                found_inf=None,
                has_complex=False,
                amsgrad=False,
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                lr=group["lr"],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                maximize=False,
            )


def _use_checkpointable_adam() -> None:
    import megatron.core.optimizer as megatron_optimizer
    from megatron.core.optimizer import distrib_optimizer

    if megatron_optimizer.USING_PYTORCH_OPTIMIZER:  # neither Transformer Engine nor Apex
        megatron_optimizer.Adam, megatron_optimizer.USING_PYTORCH_OPTIMIZER = CheckpointableAdam, False
        distrib_optimizer.Adam, distrib_optimizer.HAVE_APEX_OR_TE = CheckpointableAdam, True
        distrib_optimizer.USING_APEX_OPTIMIZER = True
