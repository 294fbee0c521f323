"""Settings: config.yaml, KVSTRATA_* variables and overrides, as one frozen and checked object.

Later sources win: defaults, file, environment, overrides. Anything unknown or impossible is a ConfigError whose text says, one
sentence per problem, which key and value are wrong, what is allowed and what to do.
"""

import difflib
import logging
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, PrivateAttr, ValidationError, model_validator

from kvstrata import capacity
from kvstrata.config_file import ConfigError, read_config, without_others
from kvstrata.layout import PageLayout, check_page_size
from kvstrata.units import gigabytes

__all__ = ["KEYS", "Attn", "ConfigError", "Kvc2", "Settings"]

log = logging.getLogger("kvstrata")
ENV_PREFIX = "KVSTRATA_"
ENV_OTHERS = ("KVSTRATA_CACHE_DIR", "KVSTRATA_MODEL_EXAMPLES")  # variables of ours that are not settings
ENV_SECTIONS = ("KVSTRATA_ATTN_", "KVSTRATA_KVC2_", "KVSTRATA_MAX_")  # who writes these means a setting


def _number(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError("not a number")
    return value


def _page_size(value: int) -> int:
    check_page_size(value)
    return value


def _path(value: Any) -> Any:
    text = os.fspath(value) if isinstance(value, os.PathLike) else value
    if isinstance(text, str):
        if not text.strip() or "\0" in text:
            raise ValueError("not a path")
        try:
            Path(text).expanduser()
        except RuntimeError as error:  # "~name" of a user that does not exist
            raise ValueError(str(error)) from error
    return text


def _setting(default: Any, effect: str, unit: str, allowed: str, fix: str, **limits: Any) -> Any:
    """A field of the settings. `allowed` completes "must be ...", `fix` is what to do about a wrong value."""
    return Field(default, description=effect, json_schema_extra={"unit": unit, "allowed": allowed, "fix": fix}, **limits)


Count = Annotated[int, BeforeValidator(_number)]
Number = Annotated[float, BeforeValidator(_number)]
Size = Annotated[float, BeforeValidator(gigabytes)]
SIZE = 'a size above 0: a number of GB (10^9 bytes) or a text such as "64GiB" or "512MB"'


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Attn(_Section):
    """How tokens are divided."""

    page_size: Annotated[Count, AfterValidator(_page_size)] = _setting(
        256,
        "tokens of a page, the unit of storage, transfer and eviction",
        "tokens",
        "a power of two from 16 to 1024",
        "use 256 if in doubt",
    )
    chunk_size: Count = _setting(
        256,
        "prefill runs in chunks of the larger of chunk_size and page_size",
        "tokens",
        "from 1 to 1048576 tokens, and it or attn.page_size must divide the other",
        "use 256 if in doubt",
        ge=1,
        le=1 << 20,
    )

    @model_validator(mode="after")
    def _fit(self) -> Self:
        if max(self.chunk_size, self.page_size) % min(self.chunk_size, self.page_size):
            raise ValueError(
                f"attn.chunk_size {self.chunk_size} and attn.page_size {self.page_size} do not fit: one must divide the other; "
                "set chunk_size to a multiple of page_size or leave both out"
            )
        return self


class Kvc2(_Section):
    """What the tiers may use."""

    gpu_only: bool = _setting(False, "true keeps pages in the GPU tier only", "", "true or false", "leave it out for all tiers")
    utilization_percentage: Number = _setting(
        0.9,
        "share of the device memory left after model and activations that the GPU tier takes; not used on the CPU",
        "share",
        "above 0 and at most 1",
        "use 0.9 if in doubt",
        gt=0,
        le=1,
    )
    gpu_memory_size_GB: Size | None = _setting(
        None,
        "size of the GPU tier; by default utilization_percentage decides, on the CPU max_batch_size x 4096 tokens",
        "GB",
        SIZE,
        "leave it out for the default",
        gt=0,
    )
    cpu_memory_size_GB: Size | None = _setting(
        None,
        "size of the CPU tier; by default 10 % of the smaller of free memory and cgroup limit, at most 8 GB",
        "GB",
        SIZE,
        "leave it out for the default",
        gt=0,
    )
    disk_path: Annotated[str, BeforeValidator(_path)] | None = _setting(
        None,
        "directory of the disk tier; without one there is no disk tier",
        "path",
        "the path of a directory",
        "leave it out for no disk tier",
    )
    disk_group: bool = _setting(
        False,
        "true lets the members of the directory's group share it, and read each other's prompts there",
        "",
        "true or false",
        "leave it out for a directory of this user alone",
    )
    disk_size_GB: Size | None = _setting(
        None,
        "size of the disk tier; by default 10 % of the space that is free or held by the cache, at most 50 GB",
        "GB",
        SIZE,
        "leave it out for the default",
        gt=0,
    )
    disk_reserve_free_GB: Size = _setting(
        1.0,
        "space on the file system that the disk tier leaves free",
        "GB",
        SIZE.replace("above 0", "of 0 or more"),
        "use 1 if in doubt",
        ge=0,
    )
    io_threads: Count = _setting(
        4, "threads that read and write the disk tier", "threads", "from 1 to 64", "use 4 if in doubt", ge=1, le=64
    )
    load_deadline_s: Number = _setting(
        5.0,
        "how long a request waits for pages from a slower tier before it computes them",
        "seconds",
        "from 0 to 3600 seconds",
        "use 5 if in doubt",
        ge=0,
        le=3600,
    )


class Settings(_Section):
    """All settings. Made by `Settings.load`; `Settings()` holds the defaults."""

    attn: Attn = Attn()
    kvc2: Kvc2 = Kvc2()
    max_batch_size: Count = _setting(
        8, "requests that run at once", "requests", "from 1 to 4096", "use 8 if in doubt", ge=1, le=4096
    )
    _origins: dict[str, str] = PrivateAttr(default_factory=dict)
    _others: tuple[str, ...] = PrivateAttr(default=())

    @classmethod
    def load(
        cls,
        source: str | Path | Mapping[str, Any] | None = None,
        overrides: Mapping[str, Any] | None = None,
        *,
        environ: Mapping[str, str] | None = None,
    ) -> "Settings":
        """Settings from a YAML file or a mapping, KVSTRATA_* variables (KVSTRATA_KVC2_DISK_PATH) and overrides.

        Mappings may nest ({"kvc2": {"gpu_only": True}}) or have dotted keys ({"kvc2.gpu_only": True}). `environ`: os.environ by
        default. Raises ConfigError.
        """
        found: dict[str, tuple[Any, str]] = {}
        problems: list[str] = []
        others: tuple[str, ...] = ()
        if source is not None:
            if isinstance(source, Mapping):
                _collect(source, "given", found, problems)
            elif not isinstance(source, str | Path):
                raise ConfigError(f"settings must be a path, a mapping or Settings, not {source!r}")
            else:
                content, others = without_others(read_config(Path(source)))
                _collect(content, str(source), found, problems)
        _collect_environment(os.environ if environ is None else environ, found, problems)
        _collect(overrides or {}, "override", found, problems)
        if problems:
            raise ConfigError("\n".join(problems))
        nested: dict[str, Any] = {}
        for key, (value, _) in found.items():
            section, _, name = key.rpartition(".")
            (nested.setdefault(section, {}) if section else nested)[name] = value
        try:
            settings = cls.model_validate(nested)
        except ValidationError as error:
            raise ConfigError("\n".join(dict.fromkeys(_sentence(one, found) for one in error.errors()))) from None
        settings._others = others
        settings._origins.update((key, origin) for key, (_, origin) in found.items())
        return settings

    @property
    def chunk(self) -> int:
        """Tokens of a prefill chunk: the larger of chunk_size and page_size."""
        return max(self.attn.chunk_size, self.attn.page_size)

    @property
    def disk_root(self) -> Path | None:
        """The absolute path of the disk tier, None without one."""
        path = None if self.kvc2.gpu_only else self.kvc2.disk_path
        return None if path is None else Path(path).expanduser().absolute()

    def check(self) -> None:
        """Checks what needs no model: memory for the CPU tier, and the directory of the disk tier. Raises ConfigError."""
        capacity.check(self)

    def resolve(self, layout: PageLayout, *, device: str = "cpu", device_free_bytes: int | None = None) -> capacity.Capacity:
        """The tiers in effect for a model, in bytes, pages and tokens; its `banner()` tells them.

        Arguments and errors as `capacity.resolve`.
        """
        return capacity.resolve(self, layout, device=device, device_free_bytes=device_free_bytes)

    def origin(self, key: str) -> str:
        """Where the value of a dotted key came from: "default", the path of a file, "given", the name of a variable, "override"."""
        return self._origins.get(key, "default")

    @property
    def others(self) -> tuple[str, ...]:
        """Sections of the file that are KTransformers' own and were passed over."""
        return self._others

    def value(self, key: str) -> Any:
        """The value of a dotted key."""
        section, _, name = key.rpartition(".")
        return getattr(getattr(self, section) if section else self, name)


def _keys() -> Iterator[tuple[str, Any]]:
    for name, field in Settings.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from ((f"{name}.{inner}", one) for inner, one in field.annotation.model_fields.items())
        else:
            yield name, field


KEYS: dict[str, Any] = dict(_keys())  # every setting by its dotted key: its pydantic field (default, description, unit, ...)
_SECTIONS = sorted({key.rpartition(".")[0] for key in KEYS} - {""})
_NAMES = {part for key in KEYS for part in key.split(".")}
_VARIABLES = {ENV_PREFIX + key.replace(".", "_").upper(): key for key in KEYS}


def _collect(content: Mapping[str, Any], origin: str, found: dict[str, tuple[Any, str]], problems: list[str]) -> None:
    """Adds the settings of a mapping by dotted key; what is no setting becomes a problem."""
    for key, value in content.items():
        if key in _SECTIONS:
            if value is None:  # a section whose keys are all commented out
                continue
            if not isinstance(value, Mapping):
                names = ", ".join(one.rpartition(".")[2] for one in KEYS if one.startswith(f"{key}."))
                problems.append(f"{key} is {value!r}{_from(origin)}, but must be a section with the keys {names}")
                continue
            _collect({f"{key}.{name}": inner for name, inner in value.items()}, origin, found, problems)
        elif key in KEYS:
            found[key] = (value, origin)
        else:
            problems.append(f"unknown key {key!r}{_from(origin)}: {_nearest(str(key), [*KEYS, *_SECTIONS])}")


def _collect_environment(environ: Mapping[str, str], found: dict[str, tuple[Any, str]], problems: list[str]) -> None:
    for variable, value in sorted(environ.items()):
        if variable in _VARIABLES:
            found[_VARIABLES[variable]] = (None if value.lower() in ("null", "none") else value, variable)
        elif variable.startswith(ENV_PREFIX) and variable not in ENV_OTHERS:
            if variable.startswith(ENV_SECTIONS) or difflib.get_close_matches(variable, _VARIABLES, n=1, cutoff=0.85):
                problems.append(f"unknown environment variable {variable}: {_nearest(variable, [*_VARIABLES, *ENV_OTHERS])}")
            else:  # orchestrators set such names for a service that is called kvstrata
                log.debug("the environment variable %s is no setting", variable)


def _nearest(wrong: str, valid: list[str]) -> str:
    by_lower = {one.lower(): one for one in reversed(valid)}
    near = difflib.get_close_matches(wrong.lower(), by_lower, n=1, cutoff=0.5)
    if "." in valid[0]:  # the right name in the wrong section, or in none
        last = {one.rpartition(".")[2].lower(): one for one in valid}
        leaf = difflib.get_close_matches(wrong.rpartition(".")[2].lower(), last, n=1, cutoff=0.8)
        near = [last[leaf[0]].lower()] if leaf else near
    return f"did you mean {by_lower[near[0]]!r}?" if near else f"valid are {', '.join(valid)}"


def _sentence(error: Any, found: Mapping[str, tuple[Any, str]]) -> str:
    """What is wrong, from one of pydantic's errors. Its place also names the members of unions, which are no keys."""
    key = ".".join(str(part) for part in error["loc"] if str(part) in _NAMES)
    if key not in KEYS:  # about several keys, in our own words
        return str(error["ctx"]["error"])
    value, origin = found[key]
    more = KEYS[key].json_schema_extra
    return f"{key} is {value!r}{_from(origin)}, but must be {more['allowed']}; {more['fix']}"


def _from(origin: str) -> str:
    return "" if origin in ("given", "override") else f" (from {origin})"
