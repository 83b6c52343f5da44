"""`bench convert`: the command `convert` against a plain copy of the same bytes, and its memory against the size of the model."""

from __future__ import annotations

import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_arpo.bench.random_model import qwen3_config, write_random_model
from megatron_arpo.bench.report import MIN_PAIRS, BenchReport, counted_ratio, paired_ratio, seconds_of
from megatron_arpo.weights.aside import sync_folder

_SIZES = {
    True: {"hidden_size": 1024, "ffn_hidden_size": 4096, "vocab_size": 32_000, "num_layers": (2, 4, 8)},
    False: {"hidden_size": 2048, "ffn_hidden_size": 8192, "vocab_size": 151_936, "num_layers": (5, 10, 20)},
}
"""Of quick and full runs: 0.3 and 3 GB in bfloat16 at the most layers; the embedding is the largest tensor of all three sizes."""
_KINDS = ("to-megatron", "to-hf")
_SECONDS = re.compile(r"in ([0-9.]+) s$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversion:
    """A run of the command. `seconds` from its first look at the source until all is on the disk and renamed, `command_s` with
    Python and PyTorch starting; the most memory it had resident, of which anonymous and file-backed may peak apart."""

    seconds: float
    command_s: float
    resident: int
    anonymous: int
    file_backed: int


def measure(quick: bool) -> BenchReport:
    """Copy and conversion in turn, on the largest of three models, and once on the others. Both read from memory what was just
    written, and both end when the bytes are on the disk. Raises ValueError where the disk has no room for it, RuntimeError where
    the command fails or a tensor does not come back as it was."""
    sizes = dict(_SIZES[quick])
    depths, workers = sizes.pop("num_layers"), len(os.sched_getaffinity(0))
    largest_bytes = sizes["vocab_size"] * sizes["hidden_size"] * 2
    with tempfile.TemporaryDirectory(prefix="megatron-arpo-bench-") as name:
        folder = Path(name)
        _check_room(folder, 2 << 30 if quick else 14 << 30)
        found: dict[int, dict[str, list[Conversion]]] = {}
        copies: dict[str, list[float]] = {kind: [] for kind in _KINDS}
        model_bytes: dict[int, int] = {}
        for layers in depths:
            model = folder / "model"
            write_random_model(model, qwen3_config(num_layers=layers, **sizes), workers)
            model_bytes[layers] = _size(model)
            is_last = layers == depths[-1]
            found[layers] = _there_and_back(model, copies if is_last else None, MIN_PAIRS if is_last else 1, workers)
            shutil.rmtree(model)
    runs = found[depths[-1]]
    seconds = {kind: [run.seconds for run in runs[kind]] for kind in _KINDS}
    peaks = {layers: max(run.resident for kind in _KINDS for run in found[layers][kind]) for layers in depths}
    return BenchReport(
        bench="convert",
        settings={"largest tensor MB": largest_bytes // 10**6, "workers": workers, "pairs": MIN_PAIRS},
        rows=[
            *(_copy_row(kind, model_bytes[depths[-1]], copies[kind]) for kind in _KINDS),
            *(_row(kind, model_bytes[layers], found[layers][kind], largest_bytes) for layers in depths for kind in _KINDS),
        ],
        ratios={
            "speed_over_cp": paired_ratio(_sums(copies), _sums(seconds)),
            "to_megatron_speed_over_cp": paired_ratio(copies["to-megatron"], seconds["to-megatron"]),
            "to_hf_speed_over_cp": paired_ratio(copies["to-hf"], seconds["to-hf"]),
            "command_speed_over_cp": paired_ratio(_sums(copies), _sums({kind: [run.command_s for run in runs[kind]] for kind in _KINDS})),
            "peak_bytes_over_largest_tensor": counted_ratio(max(peaks.values()), largest_bytes),
            "peak_of_largest_over_smallest_model": counted_ratio(peaks[depths[-1]], peaks[depths[0]]),
        },
    )


def _check_room(folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise ValueError(
            f"{folder.parent}: {free >> 30} GiB free, bench convert needs {needed >> 30}; set TMPDIR to a folder on another disk"
        )


def _there_and_back(model: Path, copies: dict[str, list[float]] | None, num_times: int, workers: int) -> dict[str, list[Conversion]]:
    """A copy of its source before or, every other time, behind each conversion, where `copies` is given to keep its seconds: a disk
    that takes bursts is faster for what comes first."""
    megatron, back, copy = model.with_name("megatron"), model.with_name("back"), model.with_name("copy")
    found: dict[str, list[Conversion]] = {kind: [] for kind in _KINDS}

    def time_copy(kind: str, source: Path) -> None:
        os.sync()
        copies[kind].append(seconds_of(lambda: _copy(source, copy)))
        shutil.rmtree(copy)

    for number in range(num_times):
        for target in (megatron, back):
            shutil.rmtree(target, ignore_errors=True)
        for kind, source, target in (("to-megatron", model, megatron), ("to-hf", megatron, back)):
            if copies is not None and number % 2 == 0:
                time_copy(kind, source)
            os.sync()
            found[kind].append(_convert(kind, source, target, workers))
            if copies is not None and number % 2:
                time_copy(kind, source)
    _run_command("verify", model, back, workers)
    for target in (megatron, back):
        shutil.rmtree(target)
    return found


def _copy(source: Path, target: Path) -> None:
    subprocess.run(["cp", "-r", "--reflink=never", str(source), str(target)], check=True)
    sync_folder(target)  # these files alone, as conversion does, and not what others on the machine write


def _convert(kind: str, source: Path, target: Path, workers: int) -> Conversion:
    started = time.perf_counter()
    output, memory = _run_command(kind, source, target, workers)
    return Conversion(
        seconds=float(_SECONDS.search(output.strip())[1]), command_s=time.perf_counter() - started, resident=memory["VmHWM"],
        anonymous=memory["RssAnon"], file_backed=memory["RssFile"],
    )  # fmt: skip


def _run_command(kind: str, source: Path, target: Path, workers: int) -> tuple[str, dict[str, int]]:
    """What the command prints, and the most that its memory was when looked at, every 5 ms."""
    command = [sys.executable, "-m", "megatron_arpo.cli", "convert", kind, str(source), str(target), "--workers", str(workers)]
    most: dict[str, int] = {}
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        while process.poll() is None:
            for name, value in _memory(process.pid).items():
                most[name] = max(most.get(name, 0), value)
            time.sleep(0.005)
        output.seek(0)
        text = output.read()
    if process.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {process.returncode}: {text[-2000:]}")
    return text, most


def _memory(pid: int) -> dict[str, int]:
    """Bytes of VmHWM (the kernel's own peak), RssAnon and RssFile; empty where the process is through."""
    lines = (line.split() for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return {words[0].rstrip(":"): int(words[1]) << 10 for words in lines if words and words[0] in ("VmHWM:", "RssAnon:", "RssFile:")}


def _copy_row(kind: str, model_bytes: int, seconds: Sequence[float]) -> dict:
    taken = statistics.median(seconds)
    name = "cp, of the Hugging Face folder" if kind == "to-megatron" else "cp, of the Megatron checkpoint"
    return {
        "run": name, "model GB": model_bytes / 1e9, "s": taken, "GB/s": model_bytes / 1e9 / taken, "command s": taken, "peak MB": "",
        "anonymous MB": "", "file MB": "", "bound MB": "",
    }  # fmt: skip


def _row(kind: str, model_bytes: int, runs: Sequence[Conversion], largest_bytes: int) -> dict:
    """Medians of the times, the largest of the peaks."""
    taken = statistics.median(run.seconds for run in runs)
    return {
        "run": f"convert {kind}", "model GB": model_bytes / 1e9, "s": taken, "GB/s": model_bytes / 1e9 / taken,
        "command s": statistics.median(run.command_s for run in runs),
        "peak MB": max(run.resident for run in runs) // 10**6, "anonymous MB": max(run.anonymous for run in runs) // 10**6,
        "file MB": max(run.file_backed for run in runs) // 10**6, "bound MB": (2 * largest_bytes + (1 << 30)) // 10**6,
    }  # fmt: skip


def _sums(seconds: dict[str, list[float]]) -> list[float]:
    """There and back together, pair by pair."""
    return [sum(pair) for pair in zip(*(seconds[kind] for kind in _KINDS), strict=True)]


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
