"""What is left of a killed writer: read as documented, opened again, and every page that is named proven to be there."""

import disk_format
from support import PAGE, begin, disk_usage, serve

from crash.scene import LAYOUTS, PROMPTS, Scene, shape_of, tokens_of
from kvstrata import _core


def inherit(scene: Scene, acknowledged: set[bytes]) -> tuple[int, list[str]]:
    """(pages served, everything that is wrong). `acknowledged`: keys of pages that were stored and not removed."""
    if scene.harmed:
        return _survive(scene)
    faults: list[str] = []
    before = max(scene.cap(), scene.cap(max(0, scene.life - 1)))  # until an opening ends, the limit before holds
    if disk_usage(scene.root) > before:
        faults.append(f"{disk_usage(scene.root):,} bytes after the kill, {before:,} allowed")
    left, _ = _tables(scene, faults)
    if missing := acknowledged - left if scene.roomy else set():
        faults.append(f"{len(missing)} of {len(acknowledged)} acknowledged pages are in no table")

    cache = scene.open(gpu=16, cpu=16)
    _, found = _tables(scene, faults)
    if not scene.handed_over and cache.stats()["disk"]["pages"] != len(found):
        faults.append(f"{cache.stats()['disk']['pages']} pages are counted, {len(found)} are in the tables")
    if disk_usage(scene.root) > scene.cap():
        faults.append(f"{disk_usage(scene.root):,} bytes after opening, {scene.cap():,} allowed")
    served = 0
    for number in range(PROMPTS):
        tokens = tokens_of(number)
        keys = disk_format.page_keys(cache.namespace(), tokens, PAGE)
        expected = next((page for page, key in enumerate(keys) if key not in found), len(keys))
        with begin(cache, tokens) as lease:  # compares every byte
            served += lease.hit // PAGE
            if lease.hit < expected * PAGE or (lease.hit > expected * PAGE and not scene.handed_over):
                faults.append(f"prompt {number}: {expected} pages are in the tables, {lease.hit // PAGE} were served")
    stats = cache.stats()
    faults += [f"{name}: {stats[name]}" for name in ("corrupt", "unreadable", "stale", "key_conflicts", "timeouts") if stats[name]]
    cache.check_integrity()
    if not cache.close():
        faults.append("nothing was to be saved, and close() did not end")

    _, after = _tables(scene, faults)
    if after < found:
        faults.append(f"{len(found - after)} pages were lost by reading them")
    report = _core.verify(str(scene.root))
    segments = [segment for shelf in report["shelves"] for segment in shelf["segments"]]
    bad = sum(segment["corrupt"] + segment["torn"] + segment["unreadable"] for segment in segments)
    if bad:
        faults.append(f"verify finds {bad} bad pages")
    return served, faults


def _survive(scene: Scene) -> tuple[int, list[str]]:
    """The same of a directory whose files were damaged."""
    cache = scene.open(gpu=16, cpu=16)
    served = 0
    for number in range(PROMPTS):
        served += serve(cache, tokens_of(number)).hit // PAGE  # compares every byte, and writes what is missing
        cache.flush(30)
    cache.check_integrity()
    faults = [] if cache.close() else ["close() did not end"]
    if disk_usage(scene.root) > scene.cap():
        faults.append(f"{disk_usage(scene.root):,} bytes, {scene.cap():,} allowed")
    for repair in (True, False):
        segments = [segment for shelf in _core.verify(str(scene.root), repair=repair)["shelves"] for segment in shelf["segments"]]
    if bad := [f"{segment['name']} ({segment['state']})" for segment in segments if segment["left"]]:
        faults.append(f"verify --repair leaves damage in {', '.join(bad)}")
    return served, faults


def _tables(scene: Scene, faults: list[str]) -> tuple[set[bytes], set[bytes]]:
    """The keys in the tables, in all and of this life's model. Faults of slots that a table names are added to `faults`."""
    keys: set[bytes] = set()
    own: set[bytes] = set()
    for layout in LAYOUTS:
        shape = shape_of(layout)
        for segment in disk_format.read_directory(scene.root, shape):
            for page in segment.pages:
                if not disk_format.proven(shape, page):
                    faults.append(f"{page.path.name} slot {page.number}: the table names a page that is not all there")
            # A segment that was being handed over has another shape's header and records of the new epoch.
            if segment.damaged and not scene.handed_over:
                faults.append(f"{segment.path.name}: {segment.damaged} damaged records")
            named = {page.record.key for page in segment.pages}
            keys |= named
            own |= named if layout is scene.layout else set()
    return keys, own
