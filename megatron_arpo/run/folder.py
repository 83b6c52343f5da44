"""The run folder: who may write to it, where things lie in it, and checkpoints that are there whole or not at all."""

from __future__ import annotations

import dataclasses
import fcntl
import json
import os
import shutil
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

from megatron_arpo.config.actor import LayoutSettings
from megatron_arpo.config.load import dump_config
from megatron_arpo.config.run import RunConfig
from megatron_arpo.families.architecture import Architecture
from megatron_arpo.observe.metrics import MetricsFile
from megatron_arpo.types import RunState
from megatron_arpo.weights.aside import sync, sync_folder
from megatron_arpo.weights.hf_files import copy_hf_files, fingerprint

_STATE_FILE = "state.json"


@dataclasses.dataclass(frozen=True, slots=True)
class StartingPoint:
    """What a run goes on from; without a checkpoint it begins."""

    checkpoint: Path | None
    state: RunState


class RunFolder:
    """An opened run folder, locked against a second run until `close` or the end of the process.

    Raises ValueError where the folder cannot be made or another process holds it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            path.mkdir(parents=True, exist_ok=True)
            self._lock: TextIO = open(path / ".lock", "a")  # noqa: SIM115 held for the life of the run
        except OSError as error:
            raise ValueError(f"run.dir={path}: cannot make the run folder ({error.strerror}); choose another") from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._lock.close()
            raise ValueError(f"run.dir={path}: another run is using this folder; wait for it or choose another run.dir") from error
        self.metrics = MetricsFile(path / "metrics.jsonl")

    def close(self) -> None:
        self._lock.close()

    def rollouts_file(self, step: int) -> Path:
        return self.path / "rollouts" / f"step_{step:06d}.jsonl"

    def evaluation_file(self, name: str, step: int) -> Path:
        return self.path / "evaluations" / f"{name}_step_{step:06d}.jsonl"

    @property
    def hf(self) -> Path:
        return self.path / "hf"

    @property
    def sequences(self) -> Path:
        """Tokenised demonstrations of `sft`."""
        return self.path / "sequences"

    def write_config(self, config: RunConfig) -> None:
        aside = self.path / ".config.yaml.tmp"
        aside.write_text(dump_config(config), encoding="utf-8")
        os.replace(aside, self.path / "config.yaml")

    def checkpoints(self) -> list[Path]:
        """Finished checkpoints, oldest first. A folder without its state is the rest of one that was being removed."""
        return sorted(one.parent for one in (self.path / "checkpoints").glob(f"step_*/{_STATE_FILE}"))

    def newest_checkpoint(self) -> Path | None:
        return next(reversed(self.checkpoints()), None)

    def starting_point(self, command: str, config: RunConfig, architecture: Architecture) -> StartingPoint:
        """The newest checkpoint of this `command`, or the state of a run that begins. Raises ValueError where the folder belongs to
        another command, seed, architecture or expert-parallel size, or `run.resume` is false."""
        checkpoint = self.newest_checkpoint()
        if checkpoint is None:
            return StartingPoint(None, RunState(step=0, weight_version=0, cursor=(0, 0), seed=config.run.seed))
        if not config.run.resume:
            raise ValueError(f"run.dir={self.path} holds {checkpoint.name} and run.resume is false; choose another run.dir")
        found = read_checkpoint(checkpoint)
        if found.command != command:
            raise ValueError(f"run.dir={self.path} holds a run of '{found.command}', not of '{command}'; choose another run.dir")
        _check_architecture(checkpoint, found.architecture, architecture)
        if found.state.seed != config.run.seed:
            raise ValueError(f"run.seed={config.run.seed} but {checkpoint} was made with {found.state.seed}; use that or another run.dir")
        _check_expert_split(checkpoint, found.layout, config.actor.layout)
        if config.algorithm.loss.kl_coef and found.model != fingerprint(config.model.path):
            raise ValueError(
                f"algorithm.loss.kl_coef={config.algorithm.loss.kl_coef}: model.path={config.model.path} is the reference and has other "
                f"weights than the model that {checkpoint} began with; use that one, or another run.dir"
            )
        return StartingPoint(checkpoint, found.state)

    def _checkpoint_bytes(self) -> int:
        """Size of the newest checkpoint; 0 without one."""
        newest = self.newest_checkpoint()
        return sum(one.stat().st_size for one in newest.rglob("*") if one.is_file()) if newest else 0

    def save_checkpoint(
        self, command: str, config: RunConfig, state: RunState, architecture: Architecture, write_weights: Callable[[Path], None]
    ) -> Path:
        """`write_weights` fills the folder it is given. Written aside and renamed: a crash or a full disk leaves the older
        checkpoints as they were. Raises ValueError where the disk has no room."""
        parent = self.path / "checkpoints"
        parent.mkdir(exist_ok=True)
        target, aside = parent / f"step_{state.step:06d}", parent / f".step_{state.step:06d}.tmp"
        shutil.rmtree(aside, ignore_errors=True)
        try:
            (aside / "weights").mkdir(parents=True)
            (aside / "hf").mkdir()
            copy_hf_files(config.model.path, aside / "hf")
            write_weights(aside / "weights")
            found = CheckpointState(
                command=command,
                state=state,
                architecture=dataclasses.asdict(architecture),
                layout=config.actor.layout.model_dump(),
                model=fingerprint(config.model.path),
            )
            (aside / _STATE_FILE).write_text(json.dumps(dataclasses.asdict(found), indent=1))
            sync_folder(aside)
        except BaseException as error:
            free = shutil.disk_usage(parent).free
            shutil.rmtree(aside, ignore_errors=True)
            text = "".join(traceback.format_exception(error))  # torch's CheckpointException is no Exception, and may lack the reason
            if not isinstance(error, KeyboardInterrupt) and ("No space left" in text or free < self._checkpoint_bytes()):
                raise ValueError(
                    f"run.dir={self.path}: the disk is full ({free >> 20} MiB free), checkpoint of step {state.step} was not written; "
                    f"older checkpoints are whole. Free space and start the same command again"
                ) from error
            raise
        _remove_checkpoint(target)
        aside.rename(target)
        sync(parent)
        for old in self.checkpoints()[: -config.run.keep_checkpoints]:
            _remove_checkpoint(old)
        return target


def _remove_checkpoint(folder: Path) -> None:
    """Its state first: what a kill leaves of the rest is then no checkpoint."""
    (folder / _STATE_FILE).unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointState:
    """What state.json of a checkpoint says: the command that wrote it, how far it was, of which model and in which layout. `model`
    is the fingerprint of the weights that the run began with."""

    command: str
    state: RunState
    architecture: dict[str, Any]
    layout: dict[str, Any]
    model: str


def read_checkpoint(checkpoint: Path) -> CheckpointState:
    """Raises ValueError where `checkpoint` is none."""
    path = checkpoint / _STATE_FILE
    try:
        values = json.loads(path.read_text())
        state = values.pop("state")
        return CheckpointState(state=RunState(**state | {"cursor": tuple(state["cursor"])}), **values)
    except OSError as error:
        raise ValueError(f"{checkpoint}: not a checkpoint ({path.name}: {error.strerror}); give a checkpoints/step_* folder") from error
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: damaged ({error}); use an older checkpoint") from error


def _check_architecture(checkpoint: Path, found: dict[str, Any], expected: Architecture) -> None:
    for name, value in dataclasses.asdict(expected).items():
        if found.get(name) != value:
            raise ValueError(
                f"{checkpoint}: checkpoint of another architecture: {name} is {found.get(name)!r} there and {value!r} in model.path; "
                f"use the model it was trained from, or another run.dir"
            )


def _check_expert_split(checkpoint: Path, found: dict[str, Any], layout: LayoutSettings) -> None:
    """megatron-core 0.16.1 cannot load an optimizer's state across expert-parallel sizes."""
    if found["ep"] != layout.ep:
        raise ValueError(
            f"actor.layout.ep={layout.ep} but {checkpoint} was written with ep={found['ep']}, and its optimizer goes on with that alone; "
            f"use ep={found['ep']}, or `megatron-arpo convert to-hf` the weights and start another run.dir from them"
        )
