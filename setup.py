"""Packaging. `pip install -e .` gives the light commands; extras bring what each machine needs."""

import re
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent
VERSION = re.search(r'__version__ = "(.+)"', (HERE / "megatron_arpo/__init__.py").read_text()).group(1)

CORE = ["pydantic>=2.12", "pyyaml", "rich", "pyarrow", "ijson", "math-verify[antlr4_13_2]==0.9.0"]
TRAIN = ["torch==2.13.0", "megatron-core==0.16.1", "ray==2.60.0", "msgpack", "transformers>=5.16.1,<5.20", "safetensors", "psutil"]
AGENT_TOOLS = ["bm25s", "numpy", "scipy", "sympy"]

setup(
    name="megatron-arpo",
    version=VERSION,
    description="Agentic reinforcement learning of large models on Megatron-Core",
    packages=find_packages(include=["megatron_arpo*"]),
    python_requires=">=3.11",
    install_requires=CORE,
    extras_require={
        "cpu": TRAIN + AGENT_TOOLS,
        "cuda": TRAIN + AGENT_TOOLS + ["vllm==0.32.0", "transformer-engine[pytorch]==2.11.0"],
        "dali": ["nvidia-dali-cuda130==2.4.0"],
        "dev": ["pytest", "pytest-timeout", "hypothesis", "ruff", "import-linter", "matplotlib"],
    },
    entry_points={
        "console_scripts": ["megatron-arpo=megatron_arpo.cli:main"],
        "vllm.general_plugins": ["megatron_arpo=megatron_arpo.engine.vllm_plugin:register"],
    },
)
