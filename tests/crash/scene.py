"""What writers and heirs agree about: the models, the prompts, and the directories with their limits."""

import random
from dataclasses import dataclass
from pathlib import Path

import disk_format
import numpy as np
from support import prompt, tiny_identity, tiny_layout

from kvstrata.cache import Limits, PrefixCache
from kvstrata.layout import PageLayout

PROMPTS = 32  # 4 to 9 pages each, the first two or three shared by some
ROOMY = 8 << 20  # bytes: nothing is ever evicted
TIGHT = (400 << 10, 700 << 10)  # a fraction of the prompts
LAYOUTS = (tiny_layout(), tiny_layout(width=24))  # two models; their slots differ in size


@dataclass(frozen=True)
class Scene:
    """One life of a directory: everything but the instants of the kills follows from the seed and the life's number."""

    root: Path
    seed: int
    life: int

    @property
    def roomy(self) -> bool:
        """Whether all that was ever acknowledged must be there."""
        return self.seed % 2 == 0

    @property
    def writers(self) -> int:
        return 2 if self.seed % 4 >= 2 else 1

    @property
    def handed_over(self) -> bool:
        """Whether the models take turns in the directory, so that segments change their shape."""
        return self.seed % 8 >= 5

    @property
    def harmed(self) -> bool:
        """Whether files are damaged after each kill: then only what is served, and the limit, can be told."""
        return self.seed % 8 == 3

    @property
    def layout(self) -> PageLayout:
        return LAYOUTS[self.life % 2 if self.handed_over else 0]

    def cap(self, life: int | None = None) -> int:
        """The limit of a life, this one by default."""
        return ROOMY if self.roomy else random.Random(f"{self.seed} {self.life if life is None else life}").choice(TIGHT)

    def open(self, *, gpu: int = 40, cpu: int = 24) -> PrefixCache:
        limits = Limits(gpu, cpu, str(self.root), self.cap(), load_deadline=30.0)
        return PrefixCache(self.layout, limits, identity=tiny_identity(self.layout), poison=True)


def shape_of(layout: PageLayout) -> disk_format.Shape:
    return disk_format.Shape(layout.page_size, tuple(plane.bytes for plane in layout.planes))


def tokens_of(number: int) -> np.ndarray:
    """A prompt, ending inside a page."""
    group = number % 4
    return np.concatenate([prompt(2 + group % 2, seed=group), prompt(2.5 + number % 5, seed=1000 + number)])
