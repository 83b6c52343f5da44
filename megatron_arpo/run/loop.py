"""One training run: prompts -> trees -> rewards -> advantages -> packed rows -> actor update -> engine weights -> checkpoint."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import closing, contextmanager
from functools import partial

from megatron_arpo.actor.sums import Sums, add_up
from megatron_arpo.config.run import RunConfig
from megatron_arpo.data.prompts import PromptCursor, PromptSet
from megatron_arpo.families.architecture import Architecture
from megatron_arpo.observe.progress import progress, say
from megatron_arpo.run.evaluate import evaluate
from megatron_arpo.run.folder import RunFolder, StartingPoint
from megatron_arpo.run.placement import Cluster
from megatron_arpo.run.prompts import Datasets, drop_long
from megatron_arpo.run.rollouts import check_replay, collect_step
from megatron_arpo.run.step_batch import batch_metrics, make_batch, row_cost
from megatron_arpo.run.step_metrics import update_metrics
from megatron_arpo.types import RolloutTree, RunState
from megatron_arpo.weights.export import export_hf
from megatron_arpo.weights.sync import WeightSync


def train(config: RunConfig, folder: RunFolder, start: StartingPoint, found: dict[str, PromptSet], architecture: Architecture) -> None:
    """Trains to `run.num_steps`, from `start`."""
    checkpoint, state = start.checkpoint, start.state
    if config.run.replay is not None:
        check_replay(config, state.step)
    if checkpoint is not None:
        say(f"resuming from {checkpoint} (step {state.step} of {config.run.num_steps})")
    data = drop_long(found, config)
    folder.write_config(config)
    folder.metrics.drop_after(state.step if checkpoint else -1)
    updates_a_step = config.rollout.prompts_per_step // config.actor.mini_batch_prompts
    parts = {"with_engine": config.run.replay is None, "with_reference": config.algorithm.loss.kl_coef > 0}
    with Cluster(config, config.run.num_steps * updates_a_step, **parts) as cluster:
        if checkpoint is not None:
            cluster.on_actors("load", checkpoint / "weights")
        training = _Training(config, folder, data, architecture, cluster, state)
        with closing(training):
            training.run()


class _Training:
    def __init__(
        self, config: RunConfig, folder: RunFolder, data: Datasets, architecture: Architecture, cluster: Cluster, state: RunState
    ) -> None:
        self._config, self._folder, self._data, self._architecture = config, folder, data, architecture
        self._cluster, self._state = cluster, state
        self._cost = row_cost(architecture)
        self._sync = None
        if config.run.replay is None:
            self._sync = WeightSync(
                cluster.actors,
                cluster.engines,
                config.weights,
                config.model,
                config.engine,
                num_kv_heads=architecture.num_kv_heads,
                run_folder=folder.path,
            )
        self._seconds: dict[str, float] = {}

    def run(self) -> None:
        config = self._config
        if config.run.replay is None:
            values = self._push_weights([])
            if self._state.step == 0:
                self._folder.metrics.write("sync", 0, values)
                self._evaluate(first=True)
        with progress("training", config.run.num_steps, self._state.step) as bar:
            while self._state.step < config.run.num_steps:
                bar.advance(self._step())
        newest = self._folder.newest_checkpoint()
        if newest is None or newest.name != f"step_{self._state.step:06d}":
            self._save()
        export_hf(self._cluster.actors, config.model.path, self._folder.hf)
        say(f"model in {self._folder.hf}")

    def close(self) -> None:
        if self._sync is not None:
            self._sync.close()

    def _step(self) -> str:
        config, started = self._config, time.perf_counter()
        step = self._state.step + 1
        self._seconds = {}
        cursor = PromptCursor(len(self._data.train), config.run.seed, *self._state.cursor)
        prompts = [self._data.train[index] for index in cursor.take(config.rollout.prompts_per_step)]
        with self._timed("rollout"):
            trees, metrics = collect_step(self._cluster, config, self._folder, prompts, step)
        with self._timed("batch"):
            batch = make_batch(trees, config, self._cost)
        with self._timed("update"):
            asleep = config.engine.sleep and config.run.replay is None and bool(batch.updates)
            if asleep:
                self._cluster.on_engine("sleep")
            updates = self._update([update.rows for update in batch.updates])
        metrics |= update_metrics(updates)
        metrics |= batch_metrics(batch)
        self._state = RunState(
            step=step,
            weight_version=self._state.weight_version + bool(updates),
            cursor=cursor.position,
            seed=config.run.seed,
        )
        if config.run.replay is None and updates:
            with self._timed("sync"):
                sync = self._push_weights(trees, asleep)
                self._folder.metrics.write("sync", step, sync)
            metrics |= {f"sync/{name}": value for name, value in sync.items()}
        last = step == config.run.num_steps
        if config.run.replay is None and (last or (config.eval.every_steps and step % config.eval.every_steps == 0)):
            with self._timed("eval"):
                self._evaluate(first=False)
        self._seconds["step"] = time.perf_counter() - started
        metrics |= {f"seconds/{name}": round(value, 4) for name, value in self._seconds.items()}
        sampled_tokens = sum(len(segment.token_ids) for tree in trees for segment in tree.model_segments())
        metrics["tokens_per_second/rollout"] = sampled_tokens / self._seconds["rollout"]
        metrics["tokens_per_second/update"] = metrics.get("actor/row_tokens", 0.0) / self._seconds["update"]
        self._folder.metrics.write("train", step, metrics)
        if not last and step % config.run.save_every_steps == 0:
            self._save()  # behind the metrics: what a checkpoint has seen is written down
        return f"reward {metrics['reward_mean']:+.3f}  forks {metrics['num_forks']:.0f}  {self._seconds['step']:.1f} s"

    def _update(self, mini_batches: Sequence[object]) -> list[Sums]:
        """Sums of each optimizer update; none where every group's rewards are equal."""
        if not mini_batches:
            say(f"step {self._state.step + 1}: every group's rewards are equal, so there is no gradient and no update")
            return []
        rows = self._cluster.share(mini_batches)
        config = self._config
        per_rank = self._cluster.on_actors("policy_step", rows, config.algorithm.loss, config.rollout.sampling.temperature)
        return [add_up(of_update) for of_update in zip(*per_rank, strict=True)]

    def _push_weights(self, trees: Sequence[RolloutTree], asleep: bool = False) -> dict[str, float]:
        sequences = [
            [*tree.segments[0].token_ids, *tree.response_token_ids(tree.leaf_ids[0])] for tree in trees
        ] or self._prompt_sequences()
        return self._sync.push(self._state.weight_version, sequences, asleep=asleep)

    def _prompt_sequences(self) -> list[list[int]]:
        """Before the first rollout there are no trajectories to compare on: prompts serve."""
        prompts = self._data.train[: self._config.weights.verify_sequences]
        return self._cluster.on_engine("encode_prompts", prompts)

    def _evaluate(self, first: bool) -> None:
        config, prompts = self._config, self._data.valid
        if not prompts:
            return
        evaluation = partial(evaluate, self._cluster, config, self._folder, prompts, self._state.step)
        values = evaluation()
        say(f"held-out reward after step {self._state.step}: {values['reward']:.3f}, pass@1 {values['pass@1']:.3f}")
        if config.eval.without_tools and (first or self._state.step == config.run.num_steps):
            evaluation(with_tools=False)

    def _save(self) -> None:
        started = time.perf_counter()
        self._folder.save_checkpoint(
            "train", self._config, self._state, self._architecture, write_weights=lambda path: self._cluster.on_actors("save", path)
        )
        self._folder.metrics.write("checkpoint", self._state.step, {"seconds": round(time.perf_counter() - started, 4)})

    @contextmanager
    def _timed(self, phase: str):
        started = time.perf_counter()
        yield
        self._seconds[phase] = time.perf_counter() - started
