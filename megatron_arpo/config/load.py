"""YAML file and key=value overrides -> RunConfig, with errors that a person can act on."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import BaseModel, ValidationError

from megatron_arpo.config.run import RunConfig

_VARIANTS = ("arpo", "grpo")
"""Values of `kind`, which pydantic puts into the path of an error."""
_VARIABLE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)(?::-([^}]*))?\}")


def load_config(path: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Reads `path`, puts `a.b=value` overrides on top and checks the result.

    Relative paths are taken from the working directory; `${NAME}` and `${NAME:-default}` come from the environment.
    Raises ValueError with one line for each problem: value, rule, field, fix.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"{path}: cannot read the configuration ({error.strerror}); give the path of a YAML file") from error
    try:
        values = yaml.safe_load(_expand_variables(text, path))
    except yaml.YAMLError as error:
        raise ValueError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path}: a configuration is a mapping of sections, found {type(values).__name__}")
    for override in overrides:
        _apply_override(values, override)
    try:
        return RunConfig.model_validate(values)
    except ValidationError as error:
        raise ValueError("\n".join(f"{path}: {_sentence(problem)}" for problem in error.errors())) from None


def dump_config(config: RunConfig) -> str:
    """YAML of the resolved configuration, every default written out."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def _expand_variables(text: str, path: Path) -> str:
    def value(match: re.Match[str]) -> str:
        name, default = match.groups()
        found = os.environ.get(name, default)
        if found is None:
            raise ValueError(f"{path}: environment variable {name} is not set; set it or write ${{{name}:-default}}")
        return found

    return _VARIABLE.sub(value, text)


def _apply_override(values: dict[str, Any], override: str) -> None:
    key, separator, text = override.partition("=")
    if not separator or not key:
        raise ValueError(f"override {override!r} must have the form section.key=value")
    *sections, last = key.split(".")
    target = values
    for section in sections:
        if target.get(section) is None:
            target[section] = {}
        target = target[section]
        if not isinstance(target, dict):
            raise ValueError(f"override {override!r}: {section} is a value, not a section")
    try:
        target[last] = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(f"override {override!r}: {text!r} is not a YAML value") from error


def _sentence(problem: Mapping[str, Any]) -> str:
    where = [str(part) for part in problem["loc"] if part not in _VARIANTS]
    field = ".".join(where)
    if problem["type"] == "extra_forbidden":
        return f"unknown key {field!r}{_nearest(where)}"
    if problem["type"] == "missing":
        return f"{field} is missing; add it"
    if problem["type"] == "union_tag_not_found":
        return f"{field}.kind is missing; use one of {', '.join(_VARIANTS)}"
    message = problem["msg"].removeprefix("Value error, ")
    if problem["type"] == "value_error":
        return f"{field}: {message}" if field else message
    return f"{field}={problem['input']!r}: {message[0].lower()}{message[1:]}"


def _nearest(where: Sequence[str]) -> str:
    """The nearest real key: first beside the unknown one, then anywhere."""
    known = dict(_all_keys(RunConfig))
    section = ".".join(part for part in where[:-1] if part in {name for key in known for name in key.split(".")})
    beside = [key.removeprefix(f"{section}.") for key in known if key.rpartition(".")[0] == section]
    match = difflib.get_close_matches(where[-1], beside, n=1, cutoff=0.5)
    if match:
        return f"; did you mean {f'{section}.' if section else ''}{match[0]}?"
    elsewhere = [key for key in known if key.rpartition(".")[2] == where[-1]]
    if elsewhere:
        return f"; did you mean {elsewhere[0]}?"
    return f"; known here: {', '.join(sorted(set(beside)))}" if beside else ""


def _all_keys(model: type[BaseModel], prefix: str = "") -> list[tuple[str, type | None]]:
    found: list[tuple[str, type | None]] = []
    for name, field in model.model_fields.items():
        found.append((prefix + name, None))
        for kind in _models_in(field.annotation):
            found.extend(_all_keys(kind, f"{prefix}{name}."))
    return found


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [kind for argument in get_args(annotation) for kind in _models_in(argument)]
