"""Versions of the packages beside this one, and the exact way to install each. Needs none of them."""

from __future__ import annotations

import importlib.metadata

TORCH_VERSION = "2.13.0"
MEGATRON_VERSION = "0.16.1"
"""The one that the patches in actor/ are written for."""
RAY_VERSION = "2.60.0"
VLLM_VERSION = "0.32.0"
TRANSFORMERS_VERSIONS = ">=5.16.1,<5.20"
TRANSFORMER_ENGINE_VERSIONS = ">=2.9,<2.12"
"""What megatron-core 0.16.1 asks for."""

INSTALL_FOR_CPU = "make install"
INSTALL_FOR_CUDA = "pip install -e '.[cuda]'"
INSTALL_MEGATRON = f"pip install megatron-core=={MEGATRON_VERSION}"
INSTALL_RAY = f"pip install ray=={RAY_VERSION}"
INSTALL_TRANSFORMERS = f"pip install 'transformers{TRANSFORMERS_VERSIONS}'"
INSTALL_TRANSFORMER_ENGINE = "pip install --no-build-isolation 'transformer-engine[pytorch]==2.11.0'"
INSTALL_APEX = "APEX_CPP_EXT=1 APEX_CUDA_EXT=1 pip install -v --no-build-isolation --no-cache-dir git+https://github.com/NVIDIA/apex"
"""From NVIDIA's repository, with its CUDA compiler: the package named apex on PyPI is something else."""
INSTALL_VLLM = f"pip install vllm=={VLLM_VERSION}"
INSTALL_DALI = "pip install -e '.[dali]'"
INSTALL_BUBBLEWRAP = "apt-get install bubblewrap"


def installed_version(*distributions: str) -> str | None:
    """Of the first of `distributions` that is installed; None where none is."""
    for name in distributions:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None
