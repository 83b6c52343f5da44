"""Actor weights -> engines: one plan for the run, buckets through a transport, and the proof that both sides hold the same model."""

from __future__ import annotations

import contextlib
import fcntl
import math
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TextIO

from megatron_arpo.config.model import ModelSettings
from megatron_arpo.config.rollout import EngineSettings
from megatron_arpo.config.weights import WeightSettings
from megatron_arpo.engine.buckets import plain
from megatron_arpo.engine.slices import kept_region
from megatron_arpo.engine.transport.base import BroadcastRoute, Connection, CudaIpcRoute, FilesRoute, Route
from megatron_arpo.engine.transport.files import create_files
from megatron_arpo.observe.progress import say
from megatron_arpo.types import WeightManifest
from megatron_arpo.weights.bucket_folder import create_shards, write_config
from megatron_arpo.weights.peers import Peers, call
from megatron_arpo.weights.plan import Need, SyncPlan, hull_of, make_plan, merge_checksums

_SHARED_MEMORY = Path("/dev/shm")
_FILE_PREFIX = "megatron-arpo-"
_LOCK = ".lock"
_MAX_VERIFY_TOKENS = 1024
OUTBOX = "engines"
"""Name of the actors' outbox that leads to the engines."""


class WeightMismatch(RuntimeError):
    """Actor and engine give the same tokens different log-probs right after a sync."""


class WeightSync:
    """Brings the engines to the actor's weights. `engine` and `num_kv_heads` say how an engine cuts the model; a folder as transport
    lies in `run_folder` unless `weights.folder` says where.

    Plan, buffers and process groups are made once. `close` removes what lies in shared memory.
    """

    def __init__(
        self,
        actors: Peers,
        engines: Peers,
        weights: WeightSettings,
        model: ModelSettings,
        engine: EngineSettings,
        *,
        num_kv_heads: int,
        run_folder: Path,
    ) -> None:
        self._actors, self._engines = actors, engines
        self._weights, self._model = weights, model
        self._num_kv_heads, self._tp, self._fp8 = num_kv_heads, engine.tp, engine.fp8
        self._run_folder = run_folder
        self._folder: Path | None = None
        self._lock: TextIO | None = None
        self._is_connected = False
        _sweep()
        num_engines = len(call(engines, "weight_version"))
        self.plan, self._mailboxes = self._make_plan(num_engines)
        try:
            self._connect()
        except BaseException:
            self.close()
            raise
        self.manifest: WeightManifest | None = None

    def push(self, version: int, verify_sequences: Sequence[Sequence[int]], *, asleep: bool = False) -> dict[str, float]:
        """Makes the engines serve `version`, and wakes them where they are `asleep`. Returns seconds (`transport`, `load`, and
        `held`: no token was generated), bytes and, with `weights.verify: logprob`, the differences of log-probs over
        `verify_sequences`. Raises WeightMismatch past the bound.
        A sync that fails is tried `weights.tries` times; the old version goes on serving, see `weights.keep_old`."""
        started = time.perf_counter()
        if asleep:
            call(self._engines, "wake", "weights")
        for left in reversed(range(self._weights.tries)):
            try:
                if not self._is_connected:
                    self._connect()
                seconds = self._push_once(version)
                break
            except (ValueError, OSError, RuntimeError) as error:
                self._give_up()
                if not left:
                    raise
                say(f"sync of weights version {version} failed ({error}); trying again")
        if asleep:
            call(self._engines, "wake", "kv_cache")
        values = {"seconds": time.perf_counter() - started, "bytes": float(self.plan.moved_bytes), "version": float(version), **seconds}
        if self._weights.verify == "logprob":
            values.update(self._verify(version, verify_sequences))
        return values

    def _give_up(self) -> None:
        """Ends an update that failed, on both sides."""
        if self._weights.transport != "broadcast":
            call(self._engines, "abandon_weights")
            return
        closing = self._actors.start("close_outbox", OUTBOX)  # wakes engines that wait for an actor
        call(self._engines, "abandon_weights")
        call(self._engines, "disconnect_weights")  # wakes actors that wait for an engine
        closing()
        self._is_connected = False  # a group that one side has left can't be used again

    def host_bytes(self) -> int:
        """What lies in files for the engines, in shared memory or on disk."""
        return sum(file.stat().st_size for file in self._folder.iterdir()) if self._folder else 0

    def close(self) -> None:
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
        if self._lock is not None:
            self._lock.close()

    def _make_plan(self, num_engines: int) -> tuple[SyncPlan, list[tuple[int, ...]]]:
        """The plan, and for each engine the mailboxes of its workers."""
        held = call(self._actors, "held_weights", self._fp8)
        ranks = [partial(kept_region, num_kv_heads=self._num_kv_heads, tp=self._tp, rank=rank) for rank in range(self._tp)]
        needs: list[Need]
        if self._shares_files:
            needs, mailboxes = [hull_of(ranks)], [(0,) * self._tp] * num_engines
        else:
            needs = ranks * num_engines
            mailboxes = [tuple(range(first, first + self._tp)) for first in range(0, len(needs), self._tp)]
        return make_plan(held, needs, self._weights.bucket_bytes), mailboxes

    @property
    def _shares_files(self) -> bool:
        return self._weights.transport in ("shared_memory", "checkpoint")

    def _connect(self) -> None:
        """Opens both sides of the transport."""
        buckets = plain(self.plan.buckets)
        route = self._route()
        if isinstance(route, CudaIpcRoute):
            handles = call(self._actors, "open_outbox", OUTBOX, route, buckets)
            route = CudaIpcRoute(handles=tuple(handles))
            opened = None
        else:
            opened = self._actors.start("open_outbox", OUTBOX, route, buckets)  # with broadcast, both sides wait for each other
        connections = [
            Connection(route=route, buckets=buckets, num_kv_heads=self._num_kv_heads, mailboxes=mailboxes) for mailboxes in self._mailboxes
        ]
        call(self._engines, "connect_weights", each=connections)
        if opened is not None:
            opened()
        self._is_connected = True

    def _route(self) -> Route:
        match self._weights.transport:
            case "shared_memory" | "checkpoint":
                self._folder = self._new_folder()
                return self._create_files()
            case "broadcast":
                host, port = next(filter(None, call(self._actors, "sync_store")))
                return BroadcastRoute(
                    host=host,
                    port=port,
                    name=secrets.token_hex(4),
                    staged=self._weights.keep_old,
                    timeout_s=self._weights.timeout_s,
                )
            case "cuda_ipc":
                return CudaIpcRoute()

    def _create_files(self) -> FilesRoute:
        buckets = self.plan.buckets
        self._folder.mkdir(parents=True)
        self._lock = open(self._folder / _LOCK, "a")  # noqa: SIM115 held until `close` or the end of the process
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        if not self._weights.keep_old:
            return create_files(self._folder, buckets)
        route = create_shards(self._folder, buckets)
        if self._weights.transport == "checkpoint":
            write_config(self._folder, buckets, self._model.path)
        return route

    def _new_folder(self) -> Path:
        if self._weights.transport == "shared_memory":
            return _SHARED_MEMORY / f"{_FILE_PREFIX}{os.getpid()}-{secrets.token_hex(4)}"
        folder = (self._weights.folder or self._run_folder) / f"{_FILE_PREFIX}weights"
        shutil.rmtree(folder, ignore_errors=True)  # of a run that was killed
        return folder

    def _push_once(self, version: int) -> dict[str, float]:
        """One attempt: buckets travel while the one before is checked or loaded; with `keep_old` all are loaded in the end."""
        keep_old, count = self._weights.keep_old, len(self.plan.buckets)
        seconds = {"transport_seconds": 0.0, "load_seconds": 0.0, "held_seconds": 0.0}
        checksums: list[list[str] | None] = []
        began = time.perf_counter()
        if not keep_old:
            call(self._engines, "begin_weights", self._weights.in_flight)
        travelling = self._travel(version, 0)
        for index in range(count):
            with _timed(seconds, "transport_seconds"):
                checksums.append(travelling())
                if index + 1 < count:
                    travelling = self._travel(version, index + 1)
                if checksums[index] is not None:
                    call(self._engines, "check_buckets", version, {index: checksums[index]})
            if not keep_old:
                with _timed(seconds, "load_seconds"):
                    call(self._engines, "load_buckets", version, [index])
        if keep_old:
            began = time.perf_counter()
            with _timed(seconds, "load_seconds"):
                call(self._engines, "begin_weights", self._weights.in_flight)
                call(self._engines, "load_buckets", version, list(range(count)))
        with _timed(seconds, "load_seconds"):
            call(self._engines, "commit_weights", version)
        seconds["held_seconds"] = time.perf_counter() - began
        self.manifest = self._manifest(version, checksums)
        return seconds

    def _travel(self, version: int, index: int) -> Callable[[], list[str] | None]:
        """Starts bucket `index` on its way; the returned function waits until the engines have it and gives its checksums."""
        sending = self._actors.start("send_bucket", OUTBOX, index, self._weights.verify != "off")

        def arrive() -> list[str] | None:
            if self._weights.transport == "broadcast":  # both sides at a time
                receiving = self._engines.start("receive_buckets", version, [index])
                checksums = sending()
                receiving()
            else:
                checksums = sending()
                call(self._engines, "receive_buckets", version, [index])
            return merge_checksums(self.plan.buckets[index], checksums)

        return arrive

    def _manifest(self, version: int, checksums: Sequence[list[str] | None]) -> WeightManifest:
        of_tensor: list[tuple[str, ...]] = []
        for bucket, found in zip(self.plan.buckets, checksums, strict=True):
            by_place: list[list[str]] = [[] for _ in bucket.places]
            for fragment, value in zip(bucket.fragments, found or (), strict=found is not None):
                by_place[fragment.tensor].append(value)
            of_tensor.extend(map(tuple, by_place))
        places = self.plan.tensors()
        return WeightManifest(
            version=version,
            names=tuple(place.name for place in places),
            dtypes=tuple(place.dtype for place in places),
            shapes=tuple(place.shape for place in places),
            checksums=tuple(of_tensor),
        )

    def _verify(self, version: int, sequences: Sequence[Sequence[int]]) -> dict[str, float]:
        scored = [list(ids[:_MAX_VERIFY_TOKENS]) for ids in sequences[: self._weights.verify_sequences] if len(ids) > 1]
        if not scored:
            return {}
        actor = first_result(call(self._actors, "score", scored))
        differences = [
            abs(a - e)
            for engine in call(self._engines, "score", scored)
            for mine, theirs in zip(actor, engine, strict=True)
            for a, e in zip(mine, theirs, strict=True)
        ]
        if not all(map(math.isfinite, differences)):
            raise WeightMismatch(f"weights version {version}: a log-prob of actor or engine is not a finite number")
        largest, mean = max(differences), math.fsum(differences) / len(differences)
        exact = self._model.dtype == "float32"
        measured, bound = (largest, self._weights.max_logprob_diff) if exact else (mean, self._weights.mean_logprob_diff)
        if not measured <= bound:
            raise WeightMismatch(
                f"weights version {version}: log-probs of actor and engine differ by {measured:.3g} ({'largest' if exact else 'mean'} over "
                f"{len(differences)} tokens), more than weights.{'max' if exact else 'mean'}_logprob_diff={bound:g}; the engine does not "
                f"serve the actor's weights"
            )
        return {"logprob_diff_max": largest, "logprob_diff_mean": mean}


@contextmanager
def _timed(seconds: dict[str, float], name: str) -> Iterator[None]:
    started = time.perf_counter()
    yield
    seconds[name] += time.perf_counter() - started


def first_result(results: Sequence[Any]) -> Any:
    """The one non-empty result of a collective that only reporting ranks answer."""
    return next(result for result in results if result)


def _sweep() -> None:
    """Removes weights of runs that were killed: nobody holds their lock."""
    for lock in _SHARED_MEMORY.glob(f"{_FILE_PREFIX}*/{_LOCK}"):
        with contextlib.suppress(OSError), open(lock, "a") as file:  # one that goes away meanwhile, or is in use
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(lock.parent, ignore_errors=True)
