"""What runs inside vLLM's own worker processes: our end of its weight-transfer interface, loading through its layer-wise reload.

Written for vLLM 0.32. Its CPU kernels pre-pack linear layers, so weights can only go in by the layer-wise way.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo

from megatron_arpo.engine.weight_receiver import Connection, WeightReceiver


@dataclass
class ShardInit(WeightTransferInitInfo):
    connection: dict[str, Any]


@dataclass
class ShardUpdate(WeightTransferUpdateInfo):
    """One step with some buckets; `checksums` has those of each bucket to check."""

    version: int
    action: Literal["receive", "check", "load"]
    buckets: list[int]
    checksums: list[list[str]] | None


class ShardTransfer(WeightTransferEngine[ShardInit, ShardUpdate]):
    """Receives buckets without touching the model, and loads them when told to. Between the first loaded bucket and the end of the
    update the model is of two versions, so the adapter holds generation for that time."""

    init_info_cls = ShardInit
    update_info_cls = ShardUpdate
    _receiver: WeightReceiver | None = None
    _loading: int | None = None

    def init_transfer_engine(self, init_info: ShardInit) -> None:
        self.shutdown()
        self._receiver = WeightReceiver(Connection(**init_info.connection), self.parallel_config.rank, self.device)

    def start_weight_update(self) -> None:
        """The model is left alone until the first bucket is loaded."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: ShardUpdate) -> None:
        version, buckets = update_info.version, update_info.buckets
        match update_info.action:
            case "receive":
                for index in buckets:
                    self._receiver.receive(version, index)
            case "check":
                for index, checksums in zip(buckets, update_info.checksums, strict=True):
                    self._receiver.check(version, index, checksums)
            case "load":
                for index in buckets:
                    self._load(version, index)

    def _load(self, version: int, index: int) -> None:
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        if self._loading is None:
            initialize_layerwise_reload(self.model)
            self._loading = version
        with torch.device(self.device), torch.no_grad():
            self.model.load_weights(self._receiver.tensors(version, index))

    def finish_weight_update(self) -> None:
        """Ends the update; raises ValueError where only a part of the version was received. Without a loaded bucket nothing happens."""
        if self._loading is None:
            return
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        version, self._loading = self._loading, None
        with torch.device(self.device), torch.no_grad():
            finalize_layerwise_reload(self.model, self.model_config)
            if self.device.type == "cpu" and self.model_config.hf_text_config.tie_word_embeddings:
                # the reload sees only the embedding; an output layer tied to it keeps what it packed from the old weights
                self.model.lm_head.quant_method.process_weights_after_loading(self.model.lm_head)
        self._receiver.check_complete(version)

    def shutdown(self) -> None:
        if self._receiver is not None:
            self._receiver.close()
            self._receiver = None
