"""Cached token sequences -> the batches of a run, fetched in the background by torch's DataLoader or by NVIDIA DALI.

What is in a batch depends on the seed and the batch's number alone, never on who fetches it or where the run began, so the
two loaders give the same batches bit for bit and a resumed run sees those of one that was never stopped. Both hand over a
whole batch laid end to end: sequences of different lengths would have to be padded or fetched one by one.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
import signal
import threading
from collections.abc import Generator, Iterator
from multiprocessing import resource_tracker
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from megatron_arpo.data.sequence_cache import SequenceBatch, SequenceCache

if TYPE_CHECKING:
    from nvidia.dali.types import SampleInfo

LoaderKind = Literal["torch", "dali"]
_BATCHES_AHEAD = 4
"""Fetched ahead by each worker."""

_Arrays = tuple[np.ndarray, np.ndarray, np.ndarray]
"""token_ids, loss_mask, lengths of a SequenceBatch."""


class BatchPlan:
    """Which sequences are in which batch: every epoch in a new order that (seed, epoch) decides, cut into `batch_size`.

    The last incomplete batch of an epoch is left for later epochs' orders; of fewer sequences than `batch_size` all make one.

    Example: with 5 sequences and batch_size 2, batches 0 and 1 are epoch 0's, batches 2 and 3 epoch 1's.
    """

    def __init__(self, num_sequences: int, batch_size: int, seed: int) -> None:
        self.batches_an_epoch = max(1, num_sequences // batch_size)
        self._num_sequences, self._batch_size, self._seed = num_sequences, batch_size, seed
        self._epoch, self._order = -1, np.zeros(0, np.int64)

    def indices(self, batch: int) -> np.ndarray:
        """Indices of the sequences of batch number `batch`, counted over all epochs."""
        epoch, index = divmod(batch, self.batches_an_epoch)
        if epoch != self._epoch:
            order = list(range(self._num_sequences))
            random.Random(f"sft {self._seed} {epoch}").shuffle(order)
            self._epoch, self._order = epoch, np.asarray(order, np.int64)
        return self._order[index * self._batch_size : (index + 1) * self._batch_size]


def check_loader(kind: LoaderKind) -> None:
    """Raises ValueError where DALI is asked for and cannot be imported."""
    if kind == "dali":
        try:
            import nvidia.dali  # noqa: F401
        except ImportError as error:
            raise ValueError(
                f"sft.loader=dali needs NVIDIA DALI, which cannot be imported ({error}); pip install -e '.[dali]' or use torch"
            ) from error


def load_batches(
    cache: SequenceCache, plan: BatchPlan, *, first: int, last: int, kind: LoaderKind, num_workers: int
) -> Generator[SequenceBatch]:
    """Batches number `first` to `last` - 1 of the plan, in order.

    `num_workers` processes fetch ahead of the caller and end with the generator; with 0 each batch is fetched when it is
    asked for.
    """
    source = _BatchSource(cache, plan, first, last)
    for token_ids, loss_mask, lengths in (_from_torch if kind == "torch" else _from_dali)(source, num_workers):
        yield SequenceBatch(token_ids, loss_mask, lengths)


class _BatchSource:
    """The batches by their position behind `first`, as torch asks for them."""

    def __init__(self, cache: SequenceCache, plan: BatchPlan, first: int, last: int) -> None:
        self._cache, self._plan, self._first, self._num_batches = cache, plan, first, max(0, last - first)

    def __len__(self) -> int:
        return self._num_batches

    def __getitem__(self, position: int) -> _Arrays:
        batch = self._cache.gather(self._plan.indices(self._first + position))
        return batch.token_ids, batch.loss_mask, batch.lengths


class _DaliSource:
    """The same batches as DALI asks for them, to which a whole batch is one sample."""

    def __init__(self, source: _BatchSource) -> None:
        self._source = source

    def __setstate__(self, state: dict[str, Any]) -> None:
        """It arrives in a worker, for whose start DALI has no hook."""
        self.__dict__.update(state)
        _end_with_parent()

    def __call__(self, sample: SampleInfo) -> _Arrays:
        if sample.iteration >= len(self._source):
            raise StopIteration
        return self._source[sample.iteration]


def _from_torch(source: _BatchSource, num_workers: int) -> Generator[_Arrays]:
    from torch.utils.data import DataLoader

    loader = DataLoader(
        source,
        batch_size=None,
        sampler=range(len(source)),
        collate_fn=_unchanged,
        num_workers=num_workers,
        multiprocessing_context="spawn" if num_workers else None,
        prefetch_factor=_BATCHES_AHEAD if num_workers else None,
        worker_init_fn=_end_with_parent,
    )
    with _workers_deaf_to_interrupts():
        batches = iter(loader)
    yield from batches


def _unchanged(arrays: _Arrays) -> _Arrays:
    """Keeps torch from making tensors of the arrays, each of which would take a shared-memory file."""
    return arrays


def _from_dali(source: _BatchSource, num_workers: int) -> Generator[_Arrays]:
    from nvidia.dali import fn
    from nvidia.dali.pipeline import Pipeline

    in_background = {"parallel": True, "prefetch_queue_depth": _BATCHES_AHEAD} if num_workers else {}
    pipeline = Pipeline(batch_size=1, num_threads=1, device_id=None, py_num_workers=max(1, num_workers), py_start_method="spawn")
    with pipeline:
        pipeline.set_outputs(*fn.external_source(source=_DaliSource(source), num_outputs=3, batch=False, **in_background))
    with _workers_deaf_to_interrupts():
        pipeline.build()
    for _ in range(len(source)):
        yield tuple(np.array(output.at(0)) for output in pipeline.run())  # copies: DALI uses its buffers again


def _end_with_parent(worker: int = 0) -> None:
    """In a worker: neither library ends one by itself when the run is killed while fetched batches wait to be taken."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()


@contextlib.contextmanager
def _workers_deaf_to_interrupts() -> Iterator[None]:
    """Ctrl-C goes to every process of a terminal; the run stops its workers itself, and they needn't each tell of it."""
    resource_tracker.ensure_running()  # started later, it would let interrupts through again
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
