"""The package as installed: versions agree, types ship, and nothing heavy is imported unasked."""

import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

import kvstrata
from kvstrata import _core


def test_version_has_one_source() -> None:
    assert kvstrata.__version__ == _core.__version__ == metadata.version("kvstrata")


def test_import_needs_no_torch() -> None:
    block = "import sys; sys.modules['torch'] = None; sys.modules['transformers'] = None; import kvstrata, kvstrata._core"
    subprocess.run([sys.executable, "-c", block], check=True, timeout=60)


def test_import_is_lazy() -> None:
    look = "import kvstrata, sys; print(sorted({'torch', 'numpy', 'pydantic', 'rich'} & sys.modules.keys()))"
    result = subprocess.run([sys.executable, "-c", look], check=True, timeout=60, capture_output=True, text=True)
    assert result.stdout.strip() == "[]"


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'PrefixCash'"):
        kvstrata.PrefixCash  # noqa: B018


def test_types_ship_with_the_package() -> None:
    assert (Path(kvstrata.__file__).parent / "py.typed").is_file()
    assert Path(_core.__file__).with_name("_core.pyi").is_file()
