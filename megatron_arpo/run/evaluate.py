"""Held-out prompts, one trajectory each, scored by the run's reward."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from megatron_arpo.algorithm.branching import NoBranching
from megatron_arpo.config.run import RunConfig
from megatron_arpo.data.prompts import PromptSet
from megatron_arpo.observe.progress import say
from megatron_arpo.rollout.base import SamplingSettings
from megatron_arpo.rollout.record import write_step
from megatron_arpo.run.folder import RunFolder
from megatron_arpo.run.placement import Cluster
from megatron_arpo.run.prompts import drop_long
from megatron_arpo.types import Prompt, RolloutTree

_EVALUATION_SEED = 0x5EED
"""Evaluations draw from generators of their own, the same ones every time."""


def evaluate(
    cluster: Cluster, config: RunConfig, folder: RunFolder, prompts: Sequence[Prompt], step: int, with_tools: bool = True
) -> dict[str, float]:
    """Grows one trajectory a prompt, records them in the run folder, writes metrics and returns them."""
    sampling = SamplingSettings(temperature=config.eval.sampling.temperature, top_p=config.eval.sampling.top_p)
    trees, _ = cluster.on_engine(
        "collect", list(prompts), NoBranching(num_rollouts=1), sampling, config.run.seed + _EVALUATION_SEED, with_tools
    )
    name = "eval" if with_tools else "eval_without_tools"
    file = folder.evaluation_file(name, step)
    file.parent.mkdir(exist_ok=True)
    write_step(file, trees)
    values = evaluation_metrics(trees)
    folder.metrics.write(name, step, values)
    return values


def evaluate_model(config: RunConfig, folder: RunFolder, found: dict[str, PromptSet]) -> None:
    """`megatron-arpo eval`: the model of model.path on data.valid, with tools and, by eval.without_tools, without."""
    if folder.checkpoints():
        raise ValueError(f"run.dir={folder.path} holds a training run; give eval a run.dir of its own")
    prompts = drop_long(found, config).valid
    folder.write_config(config)
    with Cluster(config, num_updates=0, with_engine=True, with_actor=False) as cluster:
        for with_tools in (True, False) if config.eval.without_tools else (True,):
            values = evaluate(cluster, config, folder, prompts, step=0, with_tools=with_tools)
            say("with tools" if with_tools else "without tools")
            for name, value in values.items():
                say(f"  {name:22} {value:.4f}")


def evaluation_metrics(trees: Sequence[RolloutTree]) -> dict[str, float]:
    """reward: mean score. pass@1: share with a score of at least 1. accuracy_well_formed: pass@1 among the trajectories whose
    format is right. tool_share: share that called a tool. tool_calls: calls a trajectory."""
    scores = [reward.score for tree in trees for reward in tree.rewards]
    well_formed = [reward.score for tree in trees for reward in tree.rewards if reward.parts.get("format", 1.0) > 0]
    calls = [sum(segment.kind == "tool" for segment in tree.path(leaf_id)) for tree in trees for leaf_id in tree.leaf_ids]
    return {
        "num_prompts": float(len(trees)),
        "reward": statistics.fmean(scores),
        "pass@1": statistics.fmean(score >= 1.0 for score in scores),
        "well_formed_share": len(well_formed) / len(scores),
        "accuracy_well_formed": statistics.fmean(score >= 1.0 for score in well_formed) if well_formed else 0.0,
        "tool_share": statistics.fmean(count > 0 for count in calls),
        "tool_calls": statistics.fmean(calls),
    }
