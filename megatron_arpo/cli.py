"""The command line. Arguments are read and files are checked before anything heavy is imported.

Exit codes: 0 done, 2 wrong input (one sentence for each problem on stderr), 1 a failure while running, what doctor misses or what
convert verify finds, 130 interrupted.
"""

from __future__ import annotations

import argparse
import importlib
import os
import signal
import sys
import traceback
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron_arpo.config.run import RunConfig
    from megatron_arpo.families.architecture import Architecture


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    # what Megatron says of every optional package on import; Transformer Engine and Apex speed a GPU run up and are not needed on CPU
    warnings.filterwarnings("ignore", module=r"megatron\.core")
    signal.signal(signal.SIGINT, signal.default_int_handler)  # also where a shell started us in the background, deaf to it
    try:
        return options.command(options) or 0
    except ValueError as error:
        if os.environ.get("MEGATRON_ARPO_DEBUG"):
            traceback.print_exc()
        print(f"megatron-arpo: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"megatron-arpo: interrupted; {options.interrupted}", file=sys.stderr)
        return 130
    except Exception as error:  # the end of the program: whatever went wrong is shown whole, and then in one line
        traceback.print_exc()
        print(f"megatron-arpo: failed: {error}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    from megatron_arpo import __version__

    parser = argparse.ArgumentParser(prog="megatron-arpo", description="Agentic reinforcement learning of large models on Megatron-Core.")
    parser.add_argument("--version", action="version", version=__version__)
    parser.set_defaults(interrupted="start the same command again to go on from the last checkpoint")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, function, purpose in (
        ("sft", _sft, "fine-tune on demonstrations (cold start)"),
        ("train", _train, "train with ARPO or GRPO"),
        ("eval", _eval, "score held-out prompts"),
        ("check-config", _check_config, "check a configuration and print it with every default"),
    ):
        command = commands.add_parser(name, help=purpose, description=purpose[0].upper() + purpose[1:] + ".")
        command.add_argument("config", type=Path, metavar="CONFIG.yaml")
        command.add_argument("overrides", nargs="*", metavar="section.key=value", help="settings that replace those of the file")
        command.set_defaults(command=function)
    _add_convert(commands)
    bench = commands.add_parser("bench", help="measure and compare", description="Measure and compare, side by side in one run.")
    bench.add_argument("name", choices=sorted(_BENCHES), metavar="NAME", help=", ".join(sorted(_BENCHES)))
    bench.add_argument("--quick", action="store_true", help="smaller sizes; ends within 120 s on two cores")
    bench.add_argument("--json", type=Path, metavar="FILE", help="write the report there too")
    bench.set_defaults(command=_bench)
    score = commands.add_parser("score", help="score solutions in a jsonl file", description="Score solutions in a jsonl file.")
    score.add_argument("--reward", required=True, metavar="NAME", help="deep_research, math, qa, or pkg.module:function")
    score.add_argument("source", type=Path, metavar="IN.jsonl", help='rows {"solution": str, "answer": str | [str]}')
    score.add_argument("target", type=Path, metavar="OUT.jsonl", help="the same rows with score and reason")
    score.set_defaults(command=_score)
    purpose = "show what this machine has, what each missing piece costs and how to install it"
    doctor = commands.add_parser("doctor", help=purpose, description=purpose[0].upper() + purpose[1:] + ".")
    doctor.set_defaults(command=_doctor)
    return parser


def _add_convert(commands: argparse._SubParsersAction) -> None:
    purpose = "convert checkpoints between Hugging Face and Megatron, and compare them"
    kinds = commands.add_parser("convert", help=purpose, description=purpose[0].upper() + purpose[1:] + ".").add_subparsers(
        required=True, metavar="COMMAND"
    )
    source = "Hugging Face folder, run folder, checkpoints/step_* folder, torch_dist folder, or verl's actor folder"
    for name, purpose in (
        ("to-hf", "write a folder that transformers and vLLM load"),
        ("to-megatron", "write a dist-checkpoint that any layout loads"),
        ("verify", "compare two checkpoints tensor by tensor; ends with 1 where they differ"),
    ):
        kind = kinds.add_parser(name, help=purpose, description=purpose[0].upper() + purpose[1:] + ".")
        kind.add_argument("source", type=Path, metavar="A" if name == "verify" else "SRC", help=source)
        kind.add_argument(
            "target", type=Path, metavar="B" if name == "verify" else "DST", help="the same" if name == "verify" else "new folder"
        )
        kind.add_argument("--hf-config", type=Path, metavar="FOLDER", help="config.json and tokenizer, where not those of the checkpoint")
        kind.add_argument(
            "--dtype", choices=("float32", "bfloat16", "float16"), help="cast the tensors to it; they are kept as they are without"
        )
        kind.add_argument(
            "--workers", type=_positive(int), default=min(4, len(os.sched_getaffinity(0))), metavar="N", help="threads; default %(default)s"
        )
        if name != "verify":
            kind.add_argument(
                "--max-shard-gib",
                type=_positive(float, least=0.001),
                default=5.0,
                metavar="GIB",
                help="size of a weight file; default %(default)s",
            )
        interrupted = "nothing was left behind, start the same command again"
        kind.set_defaults(command=_verify if name == "verify" else _convert, kind=name, interrupted=interrupted)


def _positive(kind: type, least: float = 1) -> Callable[[str], float]:
    def number(text: str) -> float:
        value = kind(text)
        if not least <= value < float("inf"):
            raise argparse.ArgumentTypeError(f"{text} must be at least {least} and finite")
        return value

    number.__name__ = kind.__name__  # what argparse says of text that is no number
    return number


_BENCHES = {
    "actor-tree": "megatron_arpo.bench.actor_tree",
    "convert": "megatron_arpo.bench.convert",
    "data": "megatron_arpo.bench.data",
    "sync": "megatron_arpo.bench.sync",
}
"""Name -> module with `measure(quick: bool) -> BenchReport`."""


def _load(options: argparse.Namespace) -> RunConfig:
    from megatron_arpo.config.load import load_config

    return load_config(options.config, options.overrides)


def _check_config(options: argparse.Namespace) -> None:
    from megatron_arpo.config.load import dump_config

    config = _load(options)
    _check_inputs(config)
    print(dump_config(config), end="")


def _check_inputs(config: RunConfig) -> Architecture:
    """What can be known to be wrong before anything starts, whatever the machine."""
    from megatron_arpo.agent_tools.build import check_tools
    from megatron_arpo.families.architecture import read_architecture
    from megatron_arpo.reward.base import get_reward

    architecture = read_architecture(config.model.path)
    architecture.check_layout(config.actor.layout)
    architecture.check_recompute(config.actor.recompute, config.actor.layout)
    if architecture.num_heads % config.engine.tp:
        raise ValueError(f"engine.tp={config.engine.tp} must divide num_attention_heads={architecture.num_heads}")
    get_reward(config.reward)
    check_tools(config.tools)
    return architecture


def _check_machine(config: RunConfig) -> None:
    """What this machine can't run; where the run joins a cluster, its workers look at theirs."""
    actor = config.actor
    if os.environ.get("RAY_ADDRESS"):
        return
    if actor.fp8 or actor.recompute or actor.transformer == "transformer_engine" or actor.optimizer.cpu_offload_fraction:
        from megatron_arpo.actor.kernels import check_kernels

        check_kernels(actor)
    if config.engine.fp8 or config.weights.transport == "cuda_ipc":
        from megatron_arpo.actor.device import on_cuda

        if not on_cuda():
            what = "engine.fp8=true" if config.engine.fp8 else "weights.transport=cuda_ipc"
            raise ValueError(f"{what}: there is no CUDA device; use {'false' if config.engine.fp8 else 'shared_memory'}")


def _sft(options: argparse.Namespace) -> None:
    from megatron_arpo.data.demonstrations import find_demonstrations
    from megatron_arpo.data.loader import check_loader
    from megatron_arpo.run.folder import RunFolder

    config = _load(options)
    if config.sft is None:
        raise ValueError(f"{options.config}: section sft is missing; add it with sft.demonstrations")
    architecture = _check_inputs(config)
    _check_machine(config)
    files = find_demonstrations(config.sft.demonstrations, config.sft.dataset)
    check_loader(config.sft.loader)
    folder = RunFolder(config.run.dir)
    start = folder.starting_point("sft", config, architecture)

    from megatron_arpo.run.sft import fine_tune

    fine_tune(config, folder, start, files, architecture)


def _train(options: argparse.Namespace) -> None:
    from megatron_arpo.run.folder import RunFolder
    from megatron_arpo.run.prompts import read_datasets

    config = _load(options)
    architecture = _check_inputs(config)
    _check_machine(config)
    found = read_datasets(config, need_train=True)
    folder = RunFolder(config.run.dir)
    start = folder.starting_point("train", config, architecture)

    from megatron_arpo.run.loop import train

    train(config, folder, start, found, architecture)


def _eval(options: argparse.Namespace) -> None:
    from megatron_arpo.run.folder import RunFolder
    from megatron_arpo.run.prompts import read_datasets

    config = _load(options)
    _check_inputs(config)
    if config.data.valid is None:
        raise ValueError("data.valid is missing; give a parquet or jsonl file of prompts")
    if config.engine.fp8:
        raise ValueError("engine.fp8=true is for train, where a sync brings FP8 weights; eval serves model.path as it is, set it to false")
    found = read_datasets(config, need_train=False)
    folder = RunFolder(config.run.dir)

    from megatron_arpo.run.evaluate import evaluate_model

    evaluate_model(config, folder, found)


def _convert(options: argparse.Namespace) -> None:
    from megatron_arpo.convert.command import convert

    convert(
        options.kind, options.source, options.target, hf_config=options.hf_config, workers=options.workers,
        max_shard_gib=options.max_shard_gib, dtype=options.dtype,
    )  # fmt: skip


def _verify(options: argparse.Namespace) -> int:
    from megatron_arpo.convert.command import verify

    same = verify(options.source, options.target, hf_config=options.hf_config, workers=options.workers, dtype=options.dtype)
    return 0 if same else 1


def _score(options: argparse.Namespace) -> None:
    from megatron_arpo.reward.score_file import score_file

    summary = score_file(options.reward, options.source, options.target)
    print(f"{summary.num_rows} rows, mean score {summary.mean:.4f}, in {options.target}")


def _bench(options: argparse.Namespace) -> None:
    from megatron_arpo.bench.report import show, write_json

    report = importlib.import_module(_BENCHES[options.name]).measure(options.quick)
    show(report)
    if options.json is not None:
        write_json(report, options.json)


def _doctor(_options: argparse.Namespace) -> int:
    from megatron_arpo.run.doctor import examine, missing_for_cpu_training, show

    findings = examine()
    show(findings)
    return 1 if missing_for_cpu_training(findings) else 0


if __name__ == "__main__":
    sys.exit(main())
