"""`bench convert`: conversion against a plain copy of the same bytes, and its memory against the size of the model."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import statistics
import subprocess
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from megatron_arpo.bench.random_model import qwen3_config, write_random_model
from megatron_arpo.bench.report import MIN_PAIRS, BenchReport, counted_ratio, paired_ratio, seconds_of
from megatron_arpo.convert.open_source import open_source
from megatron_arpo.convert.to_hf import convert_to_hf
from megatron_arpo.convert.to_megatron import convert_to_megatron
from megatron_arpo.convert.verify import compare
from megatron_arpo.weights.aside import sync_folder
from megatron_arpo.weights.lazy_tensor import num_bytes

_MAX_FILE_BYTES = 5 << 30
_SIZES = {
    True: {"hidden_size": 1024, "ffn_hidden_size": 4096, "vocab_size": 32_000, "num_layers": (2, 4, 8)},
    False: {"hidden_size": 2048, "ffn_hidden_size": 8192, "vocab_size": 151_936, "num_layers": (5, 10, 20)},
}
"""Of quick and full runs: 0.3 and 3 GB in bfloat16 at the most layers; the embedding is the largest tensor of all three sizes."""


def measure(quick: bool) -> BenchReport:
    """Time of copy and conversion in turn, on the largest model; peak memory of a process for each of three sizes. Both read from
    memory what was just written, and both end when the bytes are on the disk. Raises ValueError where the disk has no room for
    it, RuntimeError where a tensor does not come back as it was."""
    sizes = dict(_SIZES[quick])
    depths, workers = sizes.pop("num_layers"), min(4, len(os.sched_getaffinity(0)))
    with tempfile.TemporaryDirectory(prefix="megatron-arpo-bench-") as name:
        folder = Path(name)
        _check_room(folder, 1 << 30 if quick else 13 << 30)
        models = {layers: folder / f"{layers}-layers" for layers in depths}
        for layers, path in models.items():
            write_random_model(path, qwen3_config(num_layers=layers, **sizes), workers)
        largest = max(map(num_bytes, open_source(models[depths[0]]).tensors.values()))
        peaks = [_peaks(layers, kind, path, folder, workers) for layers, path in models.items() for kind in ("to-megatron", "to-hf")]
        for layers in depths[:-1]:
            shutil.rmtree(models[layers])
        times = _Times(models[depths[-1]], folder, workers)
        for _ in range(MIN_PAIRS):
            times.measure()
        times.check_round_trip()
    return BenchReport(
        bench="convert",
        settings={
            "model GB": round(times.num_bytes / 1e9, 3),
            "largest tensor MB": largest // 10**6,
            "workers": workers,
            "pairs": MIN_PAIRS,
        },
        rows=[*times.rows(), *(peak.row(largest) for peak in peaks)],
        ratios={
            "speed_over_cp": paired_ratio(times.both("cp"), times.both("convert")),
            "to_megatron_speed_over_cp": paired_ratio(times.seconds["cp", "to-megatron"], times.seconds["convert", "to-megatron"]),
            "to_hf_speed_over_cp": paired_ratio(times.seconds["cp", "to-hf"], times.seconds["convert", "to-hf"]),
            "peak_bytes_over_largest_tensor": counted_ratio(max(peak.resident for peak in peaks), largest),
            "peak_of_largest_over_smallest_model": counted_ratio(
                max(peak.resident for peak in peaks[-2:]), max(peak.resident for peak in peaks[:2])
            ),
        },
    )


def _check_room(folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise ValueError(
            f"{folder.parent}: {free >> 30} GiB free, bench convert needs {needed >> 30}; set TMPDIR to a folder on another disk"
        )


class _Times:
    """Seconds of copies and conversions of one model, there and back."""

    def __init__(self, model: Path, folder: Path, workers: int) -> None:
        self._model, self._folder, self._workers = model, folder, workers
        self._megatron, self._back = folder / "megatron", folder / "back"
        self.num_bytes = _size(model)
        self.seconds: dict[tuple[str, str], list[float]] = {}

    def measure(self) -> None:
        """One pair for each direction."""
        for kind, source, target in (("to-megatron", self._model, self._megatron), ("to-hf", self._megatron, self._back)):
            copied = self._folder / "copy"
            self._time("cp", kind, lambda source=source, copied=copied: _copy(source, copied))
            shutil.rmtree(copied)
            shutil.rmtree(target, ignore_errors=True)
            self._time("convert", kind, lambda kind=kind, source=source, target=target: _convert(kind, source, target, self._workers))

    def _time(self, what: str, kind: str, action) -> None:
        os.sync()
        self.seconds.setdefault((what, kind), []).append(seconds_of(action))

    def both(self, what: str) -> list[float]:
        """There and back together, pair by pair."""
        return [sum(pair) for pair in zip(self.seconds[what, "to-megatron"], self.seconds[what, "to-hf"], strict=True)]

    def rows(self) -> list[dict]:
        return [_row(f"{what}, {kind}", self.num_bytes, seconds=statistics.median(found)) for (what, kind), found in self.seconds.items()]

    def check_round_trip(self) -> None:
        found = compare(open_source(self._model), open_source(self._back), workers=self._workers, dtype=None)
        if found.problems:
            raise RuntimeError(f"there and back is not the same: {found.problems[0]}")


def _row(what: str, model_bytes: int, *, seconds: float, peak: _Peak | None = None, largest: int = 0) -> dict:
    megabytes = ["", "", "", ""]
    if peak is not None:
        allowed = 2 * largest + (1 << 30)
        megabytes = [one // 10**6 for one in (peak.resident, peak.anonymous, peak.file_backed, allowed)]
    return {
        "run": what, "model GB": model_bytes / 1e9, "s": seconds, "GB/s": model_bytes / 1e9 / seconds,
        **dict(zip(("peak MB", "anonymous MB", "file MB", "bound MB"), megabytes, strict=True)),
    }  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class _Peak:
    """Most memory that a process, which converts once, had resident; anonymous and file-backed may peak apart."""

    kind: str
    num_layers: int
    model_bytes: int
    seconds: float
    resident: int
    anonymous: int
    file_backed: int

    def row(self, largest: int) -> dict:
        return _row(f"process, {self.kind}, {self.num_layers} layers", self.model_bytes, seconds=self.seconds, peak=self, largest=largest)


def _peaks(num_layers: int, kind: str, model: Path, folder: Path, workers: int) -> _Peak:
    """In a process of its own, imports included in the memory and in the seconds."""
    megatron, target = folder / "megatron", folder / "target"
    source = model if kind == "to-megatron" else megatron
    target = megatron if kind == "to-megatron" else folder / "back"
    os.sync()
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        started = time.perf_counter()
        resident, anonymous, file_backed = pool.apply(_convert_and_watch, (kind, source, target, workers))
        seconds = time.perf_counter() - started
    if kind == "to-hf":
        shutil.rmtree(megatron)
        shutil.rmtree(target)
    return _Peak(
        kind=kind, num_layers=num_layers, model_bytes=_size(model), seconds=seconds, resident=resident, anonymous=anonymous,
        file_backed=file_backed,
    )  # fmt: skip


def _convert_and_watch(kind: str, source: Path, target: Path, workers: int) -> tuple[int, int, int]:
    done, most = threading.Event(), {"RssAnon": 0, "RssFile": 0}

    def watch() -> None:
        while not done.wait(0.005):
            for name, value in _memory().items():
                most[name] = max(most.get(name, 0), value)

    watching = threading.Thread(target=watch)
    watching.start()
    try:
        _convert(kind, source, target, workers)
    finally:
        done.set()
        watching.join()
    return _memory()["VmHWM"], most["RssAnon"], most["RssFile"]


def _memory() -> dict[str, int]:
    """Bytes of VmHWM, RssAnon and RssFile of this process."""
    lines = (line.split() for line in Path("/proc/self/status").read_text().splitlines())
    return {words[0].rstrip(":"): int(words[1]) << 10 for words in lines if words and words[0] in ("VmHWM:", "RssAnon:", "RssFile:")}


def _convert(kind: str, source: Path, target: Path, workers: int) -> None:
    opened = open_source(source)
    if kind == "to-hf":
        convert_to_hf(opened, target, workers=workers, max_shard_bytes=_MAX_FILE_BYTES, dtype=None)
    else:
        convert_to_megatron(opened, target, workers=workers, max_file_bytes=_MAX_FILE_BYTES, dtype=None)


def _copy(source: Path, target: Path) -> None:
    subprocess.run(["cp", "-r", "--reflink=never", str(source), str(target)], check=True)
    sync_folder(target)  # these files alone, as conversion does, and not what others on the machine write


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
