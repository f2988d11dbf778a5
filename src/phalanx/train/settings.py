"""A run's settings as YAML: read over defaults, with the file and the key in every error, and written back as they were read."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar

import yaml

from phalanx.train.config import TrainConfig, closest

Config = TypeVar("Config", bound=TrainConfig)


def load(path: Path, otherwise: Config) -> Config:
    """Read a YAML file over `otherwise`, the defaults.

    Unknown keys and values of the wrong kind raise ValueError with the file, the key and the closest match.
    """
    try:
        content = yaml.safe_load(path.read_bytes())
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is not YAML: {error}") from None
    except OSError as error:
        inside = "; name a file, such as config.yaml in it" * (path / "config.yaml").is_file()
        raise ValueError(f"cannot read the configuration {path}: {error.strerror}{inside}") from None
    if content is None:
        content = {}
    if not isinstance(content, Mapping):
        raise ValueError(f"{path} holds a {type(content).__name__}; a configuration is keys and values, as in `steps: 200`")
    config: Config = _record(otherwise, content, f"{path}: ")
    return config


def from_text(text: str, where: str) -> TrainConfig:
    """The configuration that `dump` wrote; `where` is named if it cannot be read."""
    content = yaml.safe_load(text)
    if not isinstance(content, Mapping):
        raise ValueError(f"the configuration in {where} holds a {type(content).__name__}; it is keys and values")
    config: TrainConfig = _record(TrainConfig(), content, f"{where}: ")
    return config


def dump(config: TrainConfig) -> str:
    """The configuration as YAML that `load` reads back equal."""
    return yaml.safe_dump(_plain(config), sort_keys=False, allow_unicode=True)


def _plain(value: object) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, tuple):
        return list(value)
    return str(value) if isinstance(value, Path) else value


def _record(otherwise: Any, content: Mapping[Any, Any], where: str) -> Any:
    hints = typing.get_type_hints(type(otherwise))
    values = {}
    for key, value in content.items():
        name = str(key).replace("-", "_")
        if name not in hints:
            raise ValueError(f"{where}unknown key {str(key)!r}; there are {closest(name, hints)}")
        if dataclasses.is_dataclass(hints[name]):
            if not isinstance(value, Mapping):
                raise ValueError(f"{where}{name} is {value!r}; it has keys of its own, as in `{name}: {{lr: 0.001}}`")
            values[name] = _record(getattr(otherwise, name), value, f"{where}{name}.")
        else:
            values[name] = _value(hints[name], value, f"{where}{name}")
    return dataclasses.replace(otherwise, **values)


def _value(kind: Any, value: Any, where: str) -> Any:
    """`value` as `kind`, or ValueError. YAML reads 3e-4 as text, mesh: {dp: 2} as a mapping; both mean what they say."""
    origin, options = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        if value is None and type(None) in options:
            return None
        kind = next(option for option in options if option is not type(None))
        return _value(kind, value, where)
    if origin is Literal:
        if value in options:
            return value
        raise ValueError(f"{where} is {value!r}; there are {closest(str(value), options)}")
    if origin is tuple and options[-1:] == (Ellipsis,):
        if isinstance(value, Mapping):
            value = [f"{name}={place}" for name, place in value.items()]
        items = value if isinstance(value, list | tuple) else [value]
        return tuple(_value(options[0], item, where) for item in items)
    if origin is tuple and isinstance(value, list | tuple) and len(value) == len(options):
        return tuple(_value(option, item, where) for option, item in zip(options, value, strict=True))
    if kind is float and isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            raise ValueError(f"{where} is {value!r}; it is a number") from None
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if kind is str and isinstance(value, Mapping):
        return ",".join(f"{name}={place}" for name, place in value.items())
    if kind is Path and isinstance(value, str):
        return Path(value)
    if origin is None and type(value) is kind:
        return value
    named = getattr(kind, "__name__", str(kind)) if origin is None else str(kind)
    raise ValueError(f"{where} is {value!r}, of type {type(value).__name__}; it is of type {named}")
