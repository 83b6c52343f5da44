"""A row's tokens -> the slices of its context-parallel ranks: equal in tokens, and as equal as can be in attention."""

from __future__ import annotations

from collections.abc import Sequence

BLOCKS_PER_RANK = 2


def context_slices(positions: Sequence[int], num_ranks: int) -> list[tuple[tuple[int, int], ...]]:
    """Ascending [start, end) of each rank. The length of the row must be a multiple of `num_ranks` * BLOCKS_PER_RANK.

    A token's attention costs as many keys as it is deep, so blocks are dealt out from the deepest to the shallowest, there and
    back over the ranks: in a row of one path that is the first and the last block, the second and the last but one, and so on.
    """
    num_blocks = num_ranks * BLOCKS_PER_RANK
    size, rest = divmod(len(positions), num_blocks)
    if rest:
        raise ValueError(f"a row of {len(positions)} tokens can't be cut into {num_blocks} equal blocks")
    depth = [sum(positions[block * size : (block + 1) * size]) for block in range(num_blocks)]
    deepest_first = sorted(range(num_blocks), key=lambda block: -depth[block])
    slices: list[list[tuple[int, int]]] = [[] for _ in range(num_ranks)]
    for turn, block in enumerate(deepest_first):
        lap, place = divmod(turn, num_ranks)
        rank = place if lap % 2 == 0 else num_ranks - 1 - place
        slices[rank].append((block * size, (block + 1) * size))
    return [tuple(sorted(mine)) for mine in slices]
