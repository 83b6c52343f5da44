#!/usr/bin/env python3
"""`megatron-arpo convert`, for containers that have this folder but not the installed command.

tools/convert.py to-hf SRC DST, to-megatron SRC DST, verify A B; --help says more.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_arpo.cli import main

if __name__ == "__main__":
    sys.exit(main(["convert", *sys.argv[1:]]))
