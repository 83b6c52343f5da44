"""One training run: prompts -> trees -> rewards -> advantages -> packed rows -> actor update -> engine weights -> checkpoint."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import closing, contextmanager
from functools import partial

from megatron_arpo.actor.sums import Sums, add_up
from megatron_arpo.algorithm.branching import ArpoBranching, NoBranching
from megatron_arpo.config.algorithm import ArpoRollout, GrpoRollout
from megatron_arpo.config.run import RunConfig
from megatron_arpo.data.prompts import PromptCursor, PromptSet
from megatron_arpo.families.architecture import Architecture
from megatron_arpo.observe.progress import progress, say
from megatron_arpo.rollout.base import SamplingSettings
from megatron_arpo.rollout.metrics import rollout_metrics
from megatron_arpo.rollout.record import read_step, write_step
from megatron_arpo.run.evaluate import evaluate
from megatron_arpo.run.folder import RunFolder, StartingPoint
from megatron_arpo.run.placement import Cluster
from megatron_arpo.run.prompts import Datasets, drop_long
from megatron_arpo.run.step_batch import batch_metrics, make_batch, row_cost
from megatron_arpo.types import Prompt, RolloutTree, RunState
from megatron_arpo.weights.export import export_hf
from megatron_arpo.weights.sync import WeightSync


def train(config: RunConfig, folder: RunFolder, start: StartingPoint, found: dict[str, PromptSet], architecture: Architecture) -> None:
    """Trains to `run.num_steps`, from `start`."""
    checkpoint, state = start.checkpoint, start.state
    if config.run.replay is not None:
        _check_replay(config, state.step)
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
        self._sync = None if config.run.replay is not None else weight_sync(cluster, config, architecture)
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
            trees, metrics = self._collect(prompts, step)
        with self._timed("batch"):
            batch = make_batch(trees, config, self._cost)
        with self._timed("update"):
            asleep = config.engine.sleep and config.run.replay is None and bool(batch.updates)
            if asleep:
                self._cluster.on_engine("sleep")
            updates = self._update([update.rows for update in batch.updates])
        metrics |= _update_metrics(updates)
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

    def _collect(self, prompts: Sequence[Prompt], step: int) -> tuple[list[RolloutTree], dict[str, float]]:
        config = self._config
        file = self._folder.rollouts_file(step)
        file.parent.mkdir(exist_ok=True)
        tools: dict[str, float] = {}
        if config.run.replay is not None:
            trees = read_step(config.run.replay / file.name)
            if len(trees) != len(prompts):
                raise ValueError(
                    f"run.replay={config.run.replay}: {file.name} has {len(trees)} trees, rollout.prompts_per_step={len(prompts)}"
                )
        else:
            sampling = SamplingSettings(temperature=config.rollout.sampling.temperature, top_p=config.rollout.sampling.top_p)
            trees, tools = self._cluster.on_engine("collect", prompts, branching_of(config), sampling, _step_seed(config.run.seed, step))
        write_step(file, trees)
        return trees, rollout_metrics(trees) | {f"tools/{name}": value for name, value in tools.items()}

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


def weight_sync(cluster: Cluster, config: RunConfig, architecture: Architecture) -> WeightSync:
    weights = config.weights
    if weights.transport == "checkpoint" and weights.folder is None:
        weights = weights.model_copy(update={"folder": config.run.dir / "weights"})
    return WeightSync(cluster.actors, cluster.engines, weights, config.model, num_kv_heads=architecture.num_kv_heads, engine=config.engine)


def branching_of(config: RunConfig) -> ArpoBranching | NoBranching:
    match config.algorithm.rollout:
        case ArpoRollout() as arpo:
            return ArpoBranching(**arpo.model_dump(exclude={"kind"}))
        case GrpoRollout() as grpo:
            return NoBranching(num_rollouts=grpo.num_rollouts)


def _check_replay(config: RunConfig, step: int) -> None:
    for missing in range(step + 1, config.run.num_steps + 1):
        if not (config.run.replay / f"step_{missing:06d}.jsonl").exists():
            raise ValueError(f"run.replay={config.run.replay}: step_{missing:06d}.jsonl is missing; lower run.num_steps to {missing - 1}")


def _step_seed(seed: int, step: int) -> int:
    return seed * 1_000_003 + step


def _update_metrics(updates: Sequence[Sums]) -> dict[str, float]:
    """Means over the targets of all updates, each counted once for every leaf through it."""
    if not updates:
        return {}
    total = add_up(updates)
    means = ("clipped", "ratio_kl", "entropy", "mismatch", "importance_capped", "reference_kl")
    return {
        "actor/loss": total["loss"] / len(updates),
        "actor/updates": float(len(updates)),
        "actor/tokens": total["tokens"],
        "actor/row_tokens": total["row_tokens"],
        "actor/grad_norm": total["grad_norm_max"],
        "actor/lr": updates[-1]["lr_max"],
        "actor/mismatch_max": total["mismatch_max"],
        **{f"actor/{name}": total[name] / total["tokens"] for name in means if name in total},
    }
