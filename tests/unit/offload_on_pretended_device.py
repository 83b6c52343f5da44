"""Runs the offload check of tests/gpu on CPU, where some tensors pretend to be on a CUDA device.

Run as `python -m tests.unit.offload_on_pretended_device FRACTION FOLDER`; prints the check's figures as JSON. What is copied with
`.cpu()`, and what is made from it, is on the host; everything else says that it is on the device. It shows that Megatron's hybrid
optimizer is given what it needs and that its checkpoints load; nothing of streams, pinned memory or speed.
"""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import Any

warnings.filterwarnings("ignore")

import torch  # noqa: E402
from torch.overrides import TorchFunctionMode  # noqa: E402

from megatron_arpo.actor import kernels  # noqa: E402
from megatron_arpo.bench.actor import start_single_rank  # noqa: E402
from tests.gpu.sizes import TOY  # noqa: E402
from tests.gpu.test_offload import offload_differences  # noqa: E402

_IS_CUDA = torch.Tensor.is_cuda.__get__
_INHERIT = (torch.Tensor.detach, torch.Tensor.clone, torch.Tensor.float)


class _PretendedDevice(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func == _IS_CUDA:  # made anew at each look-up
            return not getattr(args[0], "is_on_host", False)
        if func is torch.Tensor.pin_memory:
            return args[0]
        if func is torch.Tensor.to and args[1:] == ("cuda",):
            return args[0]
        if func is torch.Tensor.cpu:
            copied = torch.Tensor.clone(args[0])
            copied.is_on_host = True
            return copied
        result = func(*args, **kwargs)
        if func in _INHERIT and getattr(args[0], "is_on_host", False) and result is not args[0]:
            result.is_on_host = True
        return result


def main() -> None:
    fraction, folder = float(sys.argv[1]), Path(sys.argv[2])
    start_single_rank()
    kernels.check_kernels = lambda _actor: None  # it would refuse the settings for want of a device
    with _PretendedDevice():
        found = offload_differences(TOY, folder, fraction)
    print(json.dumps(found))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
