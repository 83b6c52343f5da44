"""A vLLM plugin, loaded by vLLM in each of its processes: our weight transfer, and sharing the cores of a small machine.

vLLM 0.32's processes wait for one another by calling sched_yield in a loop. On a machine with as many such loops as cores, Linux
then keeps short-lived processes, as sandboxed tool calls are, off the cores for seconds (kernel 6.18: 100 calls took 4 to 13 s
beside a busy engine and 0.5 s beside one that sleeps). A short sleep in its place costs under a millisecond a step.
"""

from __future__ import annotations

import functools
import os
import time

SHARE_CORES = "MEGATRON_ARPO_SHARE_CORES"
"""Set by the adapter for the engines it starts on CPU; others in the same environment stay as they are."""

_NAP_S = 1e-4


WEIGHT_TRANSFER = "megatron_arpo"
"""The name of our backend in vLLM's factory of weight-transfer engines."""


@functools.cache  # vLLM may load its plugins more than once in a process, and refuses a name that it has
def _register_weight_transfer() -> None:
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    WeightTransferEngineFactory.register_engine(WEIGHT_TRANSFER, "megatron_arpo.engine.vllm_transfer", "ShardTransfer")


def register() -> None:
    _register_weight_transfer()
    if not os.environ.get(SHARE_CORES):
        return
    from vllm.distributed.device_communicators import shm_broadcast

    if not callable(getattr(shm_broadcast, "sched_yield", None)):
        raise RuntimeError("vLLM no longer waits by shm_broadcast.sched_yield; megatron_arpo/engine/vllm_plugin.py is for vLLM 0.32")
    shm_broadcast.sched_yield = lambda: time.sleep(_NAP_S)
