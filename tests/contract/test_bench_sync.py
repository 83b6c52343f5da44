"""`bench sync` in small: real Megatron ranks, every byte moved once, memory that does not grow with the model."""

from __future__ import annotations

import pytest

from megatron_arpo.bench.sync import CASES, architecture_of, measure_case, measure_memory, open_sides

pytestmark = pytest.mark.slow
BUCKET_BYTES = 8 * 2**20
LARGEST_TENSOR_MIB = 32_000 * 512 * 2 / 2**20


def test_two_ranks_to_two_ranks() -> None:
    case = CASES[1]
    with open_sides(case, architecture_of(2, quick=True)) as sides:
        row, bandwidth, needed = measure_case(sides, case, "shared memory", {"transport": "shared_memory"}, BUCKET_BYTES, lambda: 1.0)
        assert needed.value == 1.0 and bandwidth.num_pairs == 5 and bandwidth.low > 0
        assert 0 < row["transport s"] < row["seconds"] and 0 < row["load s"] < row["seconds"]
        for transport in ("shared memory", "shared memory, two buckets"):
            weighed = measure_memory(sides, case, transport, 2, BUCKET_BYTES)
            assert max(weighed["actor MiB"], weighed["engine MiB"]) < LARGEST_TENSOR_MIB + 16
