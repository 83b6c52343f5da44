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
    action: Literal["receive", "check", "load", "complete"]
    buckets: list[int]
    checksums: list[list[str]] | None


class ShardTransfer(WeightTransferEngine[ShardInit, ShardUpdate]):
    """Receives buckets without touching the model, and loads them when told to. Between the first loaded bucket and the end of the
    update the model is of two versions, so the adapter holds generation for that time."""

    init_info_cls = ShardInit
    update_info_cls = ShardUpdate
    _receiver: WeightReceiver | None = None
    _error = ""
    _loading: int | None = None
    """The version of which buckets were loaded."""

    def init_transfer_engine(self, init_info: ShardInit) -> None:
        self.shutdown()
        self._receiver = WeightReceiver(Connection(**init_info.connection), self.parallel_config.rank, self.device)

    def start_weight_update(self) -> None:
        """The model is left alone until the first bucket is loaded. What an update that failed has begun is ended first."""
        self.finish_weight_update()
        self._receiver.begin()

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Raises nothing: vLLM would end the update on this worker alone, and leave the others' replies unread. `take_error` tells."""
        try:
            self.receive_weights(self.parse_update_info(update_info))
            if self.device.type != "cpu":
                torch.accelerator.synchronize()
        except Exception as error:  # whatever it is, `take_error` hands it to the adapter, which raises it
            self._error = self._error or (str(error) if isinstance(error, ValueError) and str(error) else repr(error))

    def take_error(self) -> str:
        """What went wrong since it was last asked, or an empty string."""
        error, self._error = self._error, ""
        return error

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
            case "complete":
                self._receiver.check_complete(version)

    def _load(self, version: int, index: int) -> None:
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        if self._loading is None:
            initialize_layerwise_reload(self.model)
            self._loading = version
        with torch.device(self.device), torch.no_grad():
            self.model.load_weights(self._receiver.tensors(version, index))
            if not self._receiver.keeps_buckets:
                self._keep_what_waits(index)

    def _keep_what_waits(self, index: int) -> None:
        """Copies weights of layers that the reload has not finished out of bucket `index`, whose place is used again. Such are layers
        with padding, as embeddings of an odd vocabulary: vLLM finishes them in the end."""
        from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

        for layer in self.model.modules():
            for _, loaded in get_layerwise_info(layer).loaded_weights:
                for name, value in loaded.arguments.items():
                    if isinstance(value, torch.Tensor) and self._receiver.lies_in(index, value):
                        loaded.arguments[name] = value.clone()

    def finish_weight_update(self) -> None:
        """Ends the loading of buckets, of a whole version or of a part that was given up; nothing where none was loaded."""
        if self._loading is None:
            return
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        self._loading = None
        with torch.device(self.device), torch.no_grad():
            finalize_layerwise_reload(self.model, self.model_config)
            if self.device.type == "cpu" and self.model_config.hf_text_config.tie_word_embeddings:
                # the reload sees only the embedding; an output layer tied to it keeps what it packed from the old weights
                self.model.lm_head.quant_method.process_weights_after_loading(self.model.lm_head)

    def shutdown(self) -> None:
        if self._receiver is not None:
            self._receiver.close()
            self._receiver = None


class WeightErrors:
    """Mixed into vLLM's worker class (`worker_extension_cls`): what its interface for weights has no way back for."""

    def take_weight_error(self) -> str:
        return self.weight_transfer_engine.take_error()
