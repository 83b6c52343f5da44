"""`make quickstart`: the whole main job on two CPU cores, by the commands a user would type, and a table of what came of it.

make_task.py -> megatron-arpo sft -> megatron-arpo train (evaluates before and after, exports) -> report
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

HERE = Path(__file__).parent
BIN = Path(sys.executable).parent


class PeakMemory:
    """Largest memory of this process and all below it, shared pages counted once (PSS), sampled every few seconds."""

    def __init__(self, interval_s: float = 4.0) -> None:
        self.peak_bytes = 0
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, args=(interval_s,), daemon=True)
        self._thread.start()

    def _watch(self, interval_s: float) -> None:
        import psutil

        while not self._done.wait(interval_s):
            total = 0
            for process in [psutil.Process(), *psutil.Process().children(recursive=True)]:
                try:
                    total += process.memory_full_info().pss
                except psutil.Error:
                    continue  # it has ended meanwhile
            self.peak_bytes = max(self.peak_bytes, total)

    def stop(self) -> int:
        self._done.set()
        self._thread.join()
        return self.peak_bytes


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    folder = Path(os.environ.setdefault("QUICKSTART_DIR", "runs/quickstart"))
    seed = f"run.seed={options.seed}"
    phases = {
        "task": [
            sys.executable,
            str(HERE / "make_task.py"),
            "--out",
            str(folder / "task"),
            "--seed",
            str(options.seed),
        ],
        "sft": [str(BIN / "megatron-arpo"), "sft", str(HERE / "sft.yaml"), seed],
        "train": [str(BIN / "megatron-arpo"), "train", str(HERE / "train.yaml"), seed],
    }
    memory = PeakMemory()
    seconds = {}
    for phase, command in phases.items():
        print(f"== {phase}: {' '.join(Path(part).name if i == 0 else part for i, part in enumerate(command))}", flush=True)
        started = time.monotonic()
        code = _run(command)
        if code:
            return code
        seconds[phase] = time.monotonic() - started
    peak = memory.stop()
    sys.path.insert(0, str(HERE))
    from report import quickstart_table

    print(quickstart_table(folder, seconds, peak))
    return 0


def _run(command: list[str]) -> int:
    """The command's exit code; Ctrl-C reaches the child through the terminal, and is waited for here."""
    process = subprocess.Popen(command)
    try:
        return process.wait()
    except KeyboardInterrupt:
        process.wait()
        return 130


if __name__ == "__main__":
    sys.exit(main())
