"""Where the trees of a step come from: grown on the engine, or read from another run's recording. Either way they are recorded."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_arpo.algorithm.branching import ArpoBranching, NoBranching
from megatron_arpo.config.algorithm import ArpoRollout, GrpoRollout
from megatron_arpo.config.run import RunConfig
from megatron_arpo.rollout.base import SamplingSettings
from megatron_arpo.rollout.metrics import rollout_metrics
from megatron_arpo.rollout.record import read_step, write_step
from megatron_arpo.run.folder import RunFolder
from megatron_arpo.run.placement import Cluster
from megatron_arpo.types import Prompt, RolloutTree


def collect_step(
    cluster: Cluster, config: RunConfig, folder: RunFolder, prompts: Sequence[Prompt], step: int
) -> tuple[list[RolloutTree], dict[str, float]]:
    """Scored trees of `prompts` in their order, written to the run folder, and their metrics."""
    file = folder.rollouts_file(step)
    file.parent.mkdir(exist_ok=True)
    tools: dict[str, float] = {}
    if config.run.replay is not None:
        trees = read_step(config.run.replay / file.name)
        if len(trees) != len(prompts):
            raise ValueError(f"run.replay={config.run.replay}: {file.name} has {len(trees)} trees, rollout.prompts_per_step={len(prompts)}")
    else:
        sampling = SamplingSettings(temperature=config.rollout.sampling.temperature, top_p=config.rollout.sampling.top_p)
        trees, tools = cluster.on_engine("collect", prompts, _branching(config), sampling, _step_seed(config.run.seed, step))
    write_step(file, trees)
    return trees, rollout_metrics(trees) | {f"tools/{name}": value for name, value in tools.items()}


def check_replay(config: RunConfig, step: int) -> None:
    """Raises ValueError where a recorded step behind `step` is missing."""
    for missing in range(step + 1, config.run.num_steps + 1):
        if not (config.run.replay / f"step_{missing:06d}.jsonl").exists():
            raise ValueError(f"run.replay={config.run.replay}: step_{missing:06d}.jsonl is missing; lower run.num_steps to {missing - 1}")


def _branching(config: RunConfig) -> ArpoBranching | NoBranching:
    match config.algorithm.rollout:
        case ArpoRollout() as arpo:
            return ArpoBranching(**arpo.model_dump(exclude={"kind"}))
        case GrpoRollout() as grpo:
            return NoBranching(num_rollouts=grpo.num_rollouts)


def _step_seed(seed: int, step: int) -> int:
    return seed * 1_000_003 + step
