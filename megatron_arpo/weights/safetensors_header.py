"""The head of a safetensors file: what lies behind it, and where. The library writes one only with all tensors in memory."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

SAFETENSORS_DTYPES: Mapping[str, torch.dtype] = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2, "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8,
    "BOOL": torch.bool,
}  # fmt: skip
_NAMES = {dtype: name for name, dtype in SAFETENSORS_DTYPES.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A tensor at `offset` bytes behind the head; entries lie one behind the other without a gap."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int
    num_bytes: int


def header(entries: Sequence[Entry], alignment: int = 8) -> bytes:
    """Filled up with spaces to a multiple of `alignment` bytes."""
    described: dict[str, dict] = {"__metadata__": {"format": "pt"}}
    for one in entries:
        ends = [one.offset, one.offset + one.num_bytes]
        described[one.name] = {"dtype": _NAMES[one.dtype], "shape": list(one.shape), "data_offsets": ends}
    text = json.dumps(described, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % alignment)
    return len(text).to_bytes(8, "little") + text
