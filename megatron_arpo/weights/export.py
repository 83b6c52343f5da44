"""The actor's weights of this moment -> a Hugging Face folder, every rank writing its part."""

from __future__ import annotations

from pathlib import Path

from megatron_arpo.engine.buckets import plain
from megatron_arpo.types import Region
from megatron_arpo.weights.aside import written_aside
from megatron_arpo.weights.bucket_folder import create_shards, write_config
from megatron_arpo.weights.peers import Peers, call
from megatron_arpo.weights.plan import make_plan

_OUTBOX = "export"
_SHARD_BYTES = 4 * 2**30


def export_hf(actors: Peers, model_path: Path, target: Path) -> None:
    """Config and tokenizer come from `model_path`. Written aside and renamed, replacing `target`. Raises ValueError where there is
    no room."""
    plan = make_plan(call(actors, "held_weights", False), [lambda _name, shape: Region.whole(shape)], _SHARD_BYTES)
    with written_aside(target, plan.model_bytes, replace=True) as aside:
        route = create_shards(aside, plan.buckets)
        write_config(aside, plan.buckets, model_path)
        call(actors, "open_outbox", _OUTBOX, route, plain(plan.buckets))
        for bucket in plan.buckets:
            call(actors, "send_bucket", _OUTBOX, bucket.index, False)
        call(actors, "close_outbox", _OUTBOX)
