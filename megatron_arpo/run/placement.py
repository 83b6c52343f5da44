"""Ray: where actor ranks and rollout engines run, and how all of it goes away again."""

from __future__ import annotations

import logging
import os
import secrets
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from megatron_arpo.config.run import RunConfig
from megatron_arpo.weights.peers import call

_CLOSE_TIMEOUT_S = 6.0
_WORKER_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "MALLOC_ARENA_MAX": "2",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}


class RayPeers:
    """Ray actors that are called together (weights/peers.py)."""

    def __init__(self, handles: Sequence[Any]) -> None:
        self.handles = list(handles)

    def start(self, method: str, *arguments: Any, each: Sequence[Any] = ()) -> Callable[[], list[Any]]:
        own = [(one,) for one in each] or [()] * len(self.handles)
        calls = [getattr(handle, method).remote(*arguments, *one) for handle, one in zip(self.handles, own, strict=True)]
        return lambda: _result(calls)


class Cluster:
    """The Ray processes of one run: `with Cluster(config, ...) as cluster`. Joins the cluster of RAY_ADDRESS where that is set,
    else starts one on this machine."""

    def __init__(
        self, config: RunConfig, num_updates: int, with_engine: bool, with_actor: bool = True, with_reference: bool = False
    ) -> None:
        self._config = config
        self._with_actor = with_actor
        self._with_reference = with_reference
        self._num_updates = num_updates
        self._with_engine = with_engine
        self._private = Path(tempfile.mkdtemp(prefix="megatron-arpo-"))
        self.actors = RayPeers([])
        self.engines = RayPeers([])

    def __enter__(self) -> Cluster:
        try:
            self._start_ray()
            self._start_workers()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_error: object) -> None:
        import ray

        try:
            if self.engines.handles:
                # engines first: only their own shutdown removes their shared memory
                ray.wait([engine.close.remote() for engine in self.engines.handles], timeout=_CLOSE_TIMEOUT_S)
        finally:
            ray.shutdown()
            shutil.rmtree(self._private, ignore_errors=True)

    def on_actors(self, method: str, *arguments: Any) -> list[Any]:
        """Calls a collective on all actor ranks; their results in rank order. The first error of any rank is raised."""
        return call(self.actors, method, *arguments)

    def on_engine(self, method: str, *arguments: Any) -> Any:
        """Calls the rollout worker; its error is raised."""
        return call(self.engines, method, *arguments)[0]

    def share(self, value: Any) -> Any:
        """Puts a large argument into Ray's object store once for all ranks."""
        import ray

        return ray.put(value)

    def _start_ray(self) -> None:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        import ray

        threads = str(self._config.actor.num_threads)
        environment = {**_WORKER_ENVIRONMENT, "OMP_NUM_THREADS": threads}
        if os.environ.get("RAY_ADDRESS"):
            ray.init(runtime_env={"env_vars": environment}, log_to_driver=False, logging_level=logging.ERROR)
            return
        if "RAY_AUTH_MODE" not in os.environ:  # Ray would otherwise write a token of its own, readable by all, into the home folder
            token = self._private / "auth_token"
            with os.fdopen(os.open(token, os.O_CREAT | os.O_WRONLY | os.O_EXCL, 0o600), "w") as file:
                file.write(secrets.token_hex(32))
            os.environ["RAY_AUTH_TOKEN_PATH"] = str(token)
        ray.init(
            address="local",
            num_cpus=self._config.actor.layout.world_size + 1,  # slots, not cores: ranks share the cores of a small machine
            include_dashboard=False,
            object_store_memory=512 * 2**20,
            runtime_env={"env_vars": environment},
            log_to_driver=False,
            logging_level=logging.ERROR,
        )

    def _start_workers(self) -> None:
        import ray

        config = self._config
        found = int(ray.cluster_resources().get("GPU", 0))
        num_gpus = 1 if found else 0
        needed = config.engine.tp * self._with_engine + config.actor.layout.world_size * self._with_actor
        if found and found < needed:
            raise ValueError(
                f"{found} GPUs are here, {needed} are needed: one for each of the {config.actor.layout.world_size} actor ranks "
                f"(actor.layout) and engine.tp={config.engine.tp}; use a smaller layout or more GPUs"
            )
        if self._with_engine:
            from megatron_arpo.run.rollout_worker import RolloutWorker

            make_engine = ray.remote(num_cpus=1, num_gpus=num_gpus * config.engine.tp)(RolloutWorker)
            self.engines = RayPeers([make_engine.remote()])
            engines_up = self.engines.start("start", config)
        if self._with_actor:
            from megatron_arpo.run.actor_worker import ActorWorker

            world_size = config.actor.layout.world_size
            make_actor = ray.remote(num_cpus=1, num_gpus=num_gpus)(ActorWorker)
            self.actors = RayPeers([make_actor.remote(rank, world_size) for rank in range(world_size)])
            first = RayPeers(self.actors.handles[:1])
            (host,) = call(first, "host")
            (port,) = call(first, "open_store", host)
            self.on_actors("setup", host, port, config.model, config.actor, self._num_updates, config.run.seed, self._with_reference)
        if self._with_engine:
            engines_up()


def _result(references: Any) -> Any:
    """Waits for results. An exception comes as the worker raised it; a process that died as a RuntimeError that says so."""
    import ray

    try:
        return ray.get(references)
    except ray.exceptions.RayTaskError as error:
        raise error.cause from error
    except ray.exceptions.RayActorError as error:
        raise RuntimeError(
            "a worker process died (out of memory, or killed); start the same command again to go on from the last checkpoint"
        ) from error
