"""Reading a config file: YAML where nothing is lost silently."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

__all__ = ["ConfigError", "read_config", "without_others"]

# Sections of KTransformers' config.yaml that are about its server, its models and its kernels.
KTRANSFORMERS = ("async_server", "db", "ext", "local_chat", "log", "long_context", "model", "server", "user", "web")


class ConfigError(ValueError):
    """The configuration is wrong; the text has one sentence per problem, each with its fix."""


class _Loader(yaml.SafeLoader):
    """YAML where a key that is there twice is an error."""


def _mapping(loader: _Loader, node: yaml.MappingNode) -> dict[Any, Any]:
    seen = set()
    for key, _ in node.value:
        if isinstance(key, yaml.ScalarNode):
            if key.value in seen:
                raise yaml.MarkedYAMLError(problem=f"the key {key.value!r} is there twice", problem_mark=key.start_mark)
            seen.add(key.value)
    return loader.construct_mapping(node, deep=True)


_Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping)


def read_config(path: Path) -> Mapping[str, Any]:
    """The content of a YAML file of sections, {} for an empty one. Raises ConfigError."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"the config file {path} cannot be read: {error.strerror}; check --config") from None
    except UnicodeDecodeError:
        raise ConfigError(f"the config file {path} is not text in UTF-8; save it as such") from None
    except ValueError as error:  # a NUL in it
        raise ConfigError(f"the config file {str(path)!r} cannot be read: {error}; check --config") from None
    try:
        content = yaml.load(text, _Loader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f" at line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        problem = getattr(error, "problem", None) or str(error).partition("\n")[0]
        raise ConfigError(f"the config file {path} is not valid YAML{place}: {problem}") from None
    except RecursionError:
        raise ConfigError(f"the config file {path} nests too deeply; it needs no more than sections with their keys") from None
    except Exception as error:  # PyYAML's constructors raise what they meet: the 99th of a month, !!int of a word
        raise ConfigError(
            f"the config file {path} holds a value that is not what it looks like: {error}; write it in quotes"
        ) from None
    if content is None:
        return {}
    if not isinstance(content, Mapping):
        raise ConfigError(
            f"the config file {path} holds {type(content).__name__}, but must hold sections such as 'kvc2:' with their keys"
        )
    return content


def without_others(content: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """(the content without the sections that concern KTransformers alone, their names). What is no section stays."""
    others = tuple(key for key in content if key in KTRANSFORMERS and isinstance(content[key], Mapping | None))
    return {key: value for key, value in content.items() if key not in others}, others
