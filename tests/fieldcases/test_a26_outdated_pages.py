"""A26: after the weights were changed in place no page of before is found, in any tier, nor after a restart."""

import os

import pytest
from support import PAGE, begin, crowd, finish, prompt, serve, settle

from kvstrata.version import VersionError


@pytest.mark.parametrize("tier", ["gpu", "cpu", "disk"])
def test_pages_of_before_miss(open_cache, tmp_path, tier):
    cache = open_cache(gpu=8, cpu=16, disk=tmp_path / "disk")
    tokens = prompt(4)
    serve(cache, tokens)
    settle(cache)
    if tier != "gpu":
        crowd(cache, 1 if tier == "cpu" else 4)
    before = cache.namespace()
    report = cache.bump_version()
    assert report["done"]
    assert cache.namespace() != before
    assert serve(cache, tokens).hit == 0
    settle(cache)
    assert serve(cache, tokens).hit == 3 * PAGE  # computed since
    settle(cache)
    cache.close()
    again = open_cache(gpu=8, cpu=16, disk=tmp_path / "disk")
    assert again.namespace() not in (before, cache.namespace())
    assert serve(again, tokens).hit == 0  # nor what was computed since: by weights that a new process does not have
    settle(again)
    again.close()
    third = open_cache(gpu=8, cpu=16, disk=tmp_path / "disk")
    assert third.namespace() == again.namespace()
    assert serve(third, tokens).disk == 3 * PAGE


def test_tenants_and_adapters(open_cache, tmp_path):
    cache = open_cache(gpu=8, cpu=16, disk=tmp_path / "disk")
    tokens = prompt(3)
    for options in ({"tenant": "acme"}, {"adapter": b"a" * 32}):
        serve(cache, tokens, **options)
        settle(cache)
    report = cache.bump_version()
    assert (report["pages"], report["done"]) == (6, True)
    for options in ({"tenant": "acme"}, {"adapter": b"a" * 32}, {}):
        assert serve(cache, tokens, **options).hit == 0
        settle(cache)


def test_running_requests_keep_theirs_for_themselves(open_cache, tmp_path):
    cache = open_cache(gpu=12, cpu=16, disk=tmp_path / "disk")
    tokens = prompt(4)
    serve(cache, tokens)
    settle(cache)
    old = cache.namespace()
    lease = begin(cache, tokens)
    report = cache.bump_version(timeout=0.1)
    assert report["in_use"] == 3
    assert not report["done"]
    assert finish(cache, lease, tokens, space=old).hit == 3 * PAGE  # proven, and published to nobody who asks from now on
    assert serve(cache, tokens).hit == 0


def test_a_save_that_began_before(open_cache):
    """It lands among the outdated pages, or nowhere."""
    from support import GatedDevice

    device = GatedDevice()
    cache = open_cache(gpu=8, cpu=16, device=device)
    device.downs.clear()
    serve(cache, prompt(4))
    cache.bump_version(timeout=0.1)
    device.downs.set()
    settle(cache)
    assert serve(cache, prompt(4)).hit == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_a_directory_that_cannot_be_written(open_cache, tmp_path, monkeypatch):
    cache = open_cache(gpu=8, cpu=16, disk=tmp_path / "disk")
    serve(cache, prompt(4))
    settle(cache)
    old = cache.namespace()

    def refuse(*arguments):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("kvstrata.version._write", refuse)
    with pytest.raises(VersionError, match="cannot be written"):
        cache.bump_version()
    assert cache.namespace() == old
    assert serve(cache, prompt(4)).hit == 3 * PAGE


@pytest.mark.parametrize("content", [b"", b"junk", b"0" * 1000, b"../../etc", None])
def test_a_version_that_is_damaged(open_cache, tmp_path, content):
    root = tmp_path / "disk"
    cache = open_cache(gpu=8, cpu=16, disk=root)
    cache.bump_version()
    cache.close()
    (file,) = (root / "namespaces").glob("*.version")
    if content is None:
        file.unlink()
        file.symlink_to("/etc/passwd")
    else:
        file.write_bytes(content)
    with pytest.raises(VersionError) as error:
        open_cache(gpu=8, cpu=16, disk=root)
    assert str(file) in str(error.value)
    assert "\n" not in str(error.value)
