"""A new process: what a prompt gives there through one of the cache classes, or through the engine.

python restored.py FOLDER FAMILY HEADS CLASS-or-engine PAGE_SIZE SEED OUT: logits and reused tokens, by torch.save.
"""

import sys

import torch
from engine_kit import BYTES, words
from every_tier import logits
from view_model import KINDS, model_of, open_for, through

from kvstrata.engine import Engine


def main() -> None:
    folder, family, heads, kind, page_size, tokens, out = sys.argv[1:]
    torch.set_num_threads(1)
    model = model_of(family, int(heads))
    with open_for(model, int(page_size), folder) as cache:
        if kind == "engine":
            found = logits(Engine(model, BYTES, cache), words(int(tokens)), new=3)
        else:
            found = through(KINDS[kind](model.config, cache=cache), model, words(int(tokens)))
    torch.save(found, out)


if __name__ == "__main__":
    main()
