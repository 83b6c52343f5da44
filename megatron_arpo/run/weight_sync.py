"""Actor weights -> engine: one flat file in shared memory for each version, and the proof that both sides hold the same model."""

from __future__ import annotations

import errno
import math
import os
import time
from collections.abc import Sequence
from pathlib import Path

from megatron_arpo.config.model import ModelSettings
from megatron_arpo.config.weights import WeightSettings
from megatron_arpo.engine.weight_buffer import TensorPlace, buffer_bytes, lay_out, manifest_of
from megatron_arpo.run.placement import Cluster, first_result
from megatron_arpo.types import WeightManifest

_SHARED_MEMORY = Path("/dev/shm")
_FILE_PREFIX = "megatron-arpo-"
_MAX_VERIFY_TOKENS = 1024


class WeightMismatch(RuntimeError):
    """Actor and engine give the same tokens different log-probs right after a sync."""


class WeightSync:
    """Brings the engine to the actor's weights. The layout of the buffer is made once."""

    def __init__(self, cluster: Cluster, weights: WeightSettings, model: ModelSettings) -> None:
        self._cluster = cluster
        self._weights = weights
        self._dtype = model.dtype
        _sweep()
        shapes = [shape for rank in cluster.on_actors("weight_shapes") for shape in rank]
        self._places: tuple[TensorPlace, ...] = lay_out(shapes)

    def push(self, version: int, verify_sequences: Sequence[Sequence[int]]) -> dict[str, float]:
        """Makes the engine serve `version`. Returns seconds, bytes and, with `weights.verify: logprob`, the differences of
        log-probs over `verify_sequences`. Raises WeightMismatch past the bound."""
        started = time.perf_counter()
        path, manifest = self.write(version)
        try:
            self._cluster.on_engine("load_weights", str(path), manifest)
        finally:
            path.unlink()
        values = {"seconds": time.perf_counter() - started, "bytes": float(buffer_bytes(self._places)), "version": float(version)}
        if self._weights.verify == "logprob":
            values.update(self._verify(version, verify_sequences))
        return values

    def write(self, version: int, folder: Path = _SHARED_MEMORY) -> tuple[Path, WeightManifest]:
        """All weights in one new file of `folder`, which the caller removes."""
        path = folder / f"{_FILE_PREFIX}{os.getpid()}-v{version}"
        try:
            with open(path, "wb") as file:
                os.posix_fallocate(file.fileno(), 0, buffer_bytes(self._places))
            checksums: dict[str, int] = {}
            for rank in self._cluster.on_actors("write_weights", path, self._places):
                checksums.update(rank)
        except BaseException as error:
            path.unlink(missing_ok=True)
            if isinstance(error, OSError) and error.errno == errno.ENOSPC:
                raise ValueError(
                    f"{folder} has no room for {buffer_bytes(self._places)} bytes of weights; make it larger (in a container: --shm-size)"
                ) from error
            raise
        return path, manifest_of(self._places, checksums, version)

    def _verify(self, version: int, sequences: Sequence[Sequence[int]]) -> dict[str, float]:
        scored = [list(ids[:_MAX_VERIFY_TOKENS]) for ids in sequences[: self._weights.verify_sequences] if len(ids) > 1]
        actor = first_result(self._cluster.on_actors("score", scored))
        engine = self._cluster.on_engine("score", scored)
        differences = [abs(a - e) for mine, theirs in zip(actor, engine, strict=True) for a, e in zip(mine, theirs, strict=True)]
        if not all(map(math.isfinite, differences)):
            raise WeightMismatch(f"weights version {version}: a log-prob of actor or engine is not a finite number")
        largest, mean = max(differences), math.fsum(differences) / len(differences)
        exact = self._dtype == "float32"
        measured, bound = (largest, self._weights.max_logprob_diff) if exact else (mean, self._weights.mean_logprob_diff)
        if not measured <= bound:
            raise WeightMismatch(
                f"weights version {version}: log-probs of actor and engine differ by {measured:.3g} ({'largest' if exact else 'mean'} over "
                f"{len(differences)} tokens), more than weights.{'max' if exact else 'mean'}_logprob_diff={bound:g}; the engine does not "
                f"serve the actor's weights"
            )
        return {"logprob_diff_max": largest, "logprob_diff_mean": mean}


def _sweep() -> None:
    """Removes weight files of runs that were killed while they wrote one."""
    for path in _SHARED_MEMORY.glob(f"{_FILE_PREFIX}*-v*"):
        if not Path(f"/proc/{path.name.removeprefix(_FILE_PREFIX).partition('-')[0]}").exists():
            path.unlink(missing_ok=True)
