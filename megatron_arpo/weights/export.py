"""The actor's weights of this moment -> a Hugging Face folder, every rank writing its part."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

from megatron_arpo.engine.buckets import plain
from megatron_arpo.engine.transport.base import FilesRoute
from megatron_arpo.engine.transport.files import create_files, weight_map
from megatron_arpo.types import Region
from megatron_arpo.weights.hf_folder import copy_hf_files
from megatron_arpo.weights.peers import Peers, call
from megatron_arpo.weights.plan import make_plan

_OUTBOX = "export"
_SHARD_BYTES = 4 * 2**30


def export_hf(actors: Peers, model_path: Path, target: Path) -> None:
    """Config and tokenizer come from `model_path`. Written aside and renamed, replacing `target`. Raises ValueError where there is
    no room."""
    plan = make_plan(call(actors, "held_weights", False), [lambda _name, shape: Region.whole(shape)], _SHARD_BYTES)
    aside = target.with_name(f".{target.name}.tmp")
    shutil.rmtree(aside, ignore_errors=True)
    route = FilesRoute(folder=aside, staged=True)
    try:
        create_files(route, plan.buckets)
        call(actors, "open_outbox", _OUTBOX, route, plain(plan.buckets))
        for bucket in plan.buckets:
            call(actors, "send_bucket", _OUTBOX, bucket.index, False)
        call(actors, "close_outbox", _OUTBOX)
        copy_hf_files(model_path, aside)
        if len(plan.buckets) > 1:
            index = {"metadata": {"total_size": plan.model_bytes}, "weight_map": weight_map(plan.buckets)}
            (aside / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise
    shutil.rmtree(target, ignore_errors=True)
    os.rename(aside, target)
