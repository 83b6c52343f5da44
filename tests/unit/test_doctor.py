"""doctor says what is here and never fails for what is not."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megatron_arpo.actor import kernels
from megatron_arpo.config import packages
from megatron_arpo.run import doctor
from megatron_arpo.run.doctor import Finding, examine, missing_for_cpu_training, show

ROOT = Path(__file__).parents[2]
LIGHT = ("pydantic", "pydantic_core", "annotated_types", "typing_extensions", "typing_inspection", "PyYAML", "rich", "markdown-it-py",
         "mdurl", "Pygments")  # fmt: skip
PIECES = ["Python", "PyTorch", "CUDA devices", "megatron-core", "Transformer Engine", "NVIDIA Apex", "FP8 recipes", "Ray",
          "transformers", "vLLM", "NVIDIA DALI", "bubblewrap", "Shared memory", "Cores and memory"]  # fmt: skip


def shown(findings: list[Finding]) -> str:
    lines: list[str] = []
    show(findings, lines.append)
    return "\n".join(lines)


def named(findings: list[Finding], name: str) -> Finding:
    (found,) = [finding for finding in findings if finding.name == name]
    return found


@pytest.fixture
def light_install(tmp_path: Path) -> Path:
    """A folder of packages with no more than the light commands need."""
    folder = tmp_path / "site-packages"
    folder.mkdir()
    for name in LIGHT:
        for file in importlib.metadata.files(name):
            top = file.parts[0]
            if top != ".." and not (folder / top).exists():
                (folder / top).symlink_to(Path(file.locate()).parents[len(file.parts) - 2] if len(file.parts) > 1 else file.locate())
    return folder


def test_a_light_install_is_told_what_it_lacks(light_install: Path) -> None:
    path = os.pathsep.join([str(light_install), str(ROOT)])
    done = subprocess.run(
        [sys.executable, "-S", "-m", "megatron_arpo.cli", "doctor"],
        env={**os.environ, "PYTHONPATH": path}, cwd=light_install, text=True, capture_output=True, timeout=60,
    )  # fmt: skip
    assert "Traceback" not in done.stderr and done.returncode == 1, done.stderr
    lines = done.stdout.splitlines()
    assert lines[-1] == "missing for training on CPU: PyTorch, megatron-core, Ray, transformers, vLLM"
    assert max(map(len, lines)) <= 140
    assert f"  Ray: pip install ray=={packages.RAY_VERSION}" in lines


def test_every_piece_is_named_once() -> None:
    findings = examine()
    assert [finding.name for finding in findings] == PIECES
    assert all(finding.purpose for finding in findings)
    assert all(finding.found is not None for finding in findings if finding.usable)


def test_a_missing_package_that_is_required(monkeypatch: pytest.MonkeyPatch) -> None:
    real = packages.installed_version
    monkeypatch.setattr(packages, "installed_version", lambda *names: None if names == ("megatron-core",) else real(*names))
    findings = examine()
    assert named(findings, "megatron-core").found is None
    assert "megatron-core" in missing_for_cpu_training(findings)
    text = shown(findings)
    assert text.splitlines()[-1].startswith("missing for training on CPU: megatron-core")
    assert "  megatron-core: pip install megatron-core==0.16.1" in text.splitlines()


def test_another_version_than_the_one_needed_does_not_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    real = packages.installed_version
    monkeypatch.setattr(packages, "installed_version", lambda *names: "0.17.0" if names == ("megatron-core",) else real(*names))
    finding = named(examine(), "megatron-core")
    assert finding.found == "0.17.0" and not finding.usable


def test_a_package_that_cannot_be_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_package.py").write_text("raise OSError('libcudart.so.13: no such file')")
    monkeypatch.syspath_prepend(tmp_path)
    assert doctor._imported("broken_package") == (None, "installed, but it can't be imported: libcudart.so.13: no such file")
    finding = doctor._torch(*doctor._imported("broken_package"))
    assert not finding.usable and "libcudart" in finding.found


def test_fp8_recipes_of_a_card_and_why_not_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Card")
    monkeypatch.setattr(kernels, "transformer_engine_version", lambda: "2.11.0")
    finding = doctor._fp8(torch)
    assert finding.found == "tensorwise, delayed, blockwise"
    assert "not mxfp8: Card has compute capability 9.0, it needs 10.0" in finding.purpose


def test_the_package_named_apex_that_is_not_nvidias(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages, "installed_version", lambda *names: "0.9.10" if names == ("apex",) else None)
    finding = doctor._apex()
    assert finding.found == "a package named apex without NVIDIA's kernels" and not finding.usable
    assert "github.com/NVIDIA/apex" in finding.install and "APEX_CUDA_EXT=1" in finding.install


def test_a_sandbox_that_cannot_run_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    finding = doctor._bubblewrap()
    assert not finding.usable and "bubblewrap is not installed" in finding.found


def test_the_table_fits() -> None:
    lines = shown(examine()).splitlines()
    assert max(map(len, lines)) <= 140
