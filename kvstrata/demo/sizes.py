"""How large the tiers of the demo are and how much other traffic runs, so that pages fall exactly one tier at a time.

Tiers evict the least recently used pages. The GPU pool holds one request and nothing else: another prompt of the same size pushes
the text out. The CPU tier holds the text and that other prompt: as many new pages as it has rows push the text out of it.
"""

from dataclasses import dataclass

ANSWER_TOKENS = 24  # of every answer, at most


@dataclass(frozen=True)
class Sizes:
    """Pages of each tier, and the lengths in tokens of the other prompts, which are asked for one token each."""

    gpu_pages: int  # without the pool's scratch row
    cpu_pages: int
    disk_pages: int
    past_gpu: tuple[int, ...]
    past_cpu: tuple[int, ...]

    @property
    def other_tokens(self) -> int:
        """Tokens of all other prompts together."""
        return sum(self.past_gpu) + sum(self.past_cpu)


def make_sizes(prompt_tokens: int, page_size: int) -> Sizes:
    """Sizes for two questions of at most `prompt_tokens` tokens about one text."""
    gpu_pages = -(-(prompt_tokens + ANSWER_TOKENS) // page_size)
    per_prompt = gpu_pages - 1  # full pages of another prompt that needs every row: it fills all but one, and begins that one
    text = (prompt_tokens - 1) // page_size
    # The text, the rest of both questions where pages are small, the prompt that pushes them out of the GPU pool, and one to spare.
    cpu_pages = text + 2 * (per_prompt - text) + per_prompt + 1
    full, rest = divmod(cpu_pages + 1, per_prompt)
    past_cpu = (per_prompt,) * full + ((rest,) if rest else ())
    return Sizes(
        gpu_pages=gpu_pages,
        cpu_pages=cpu_pages,
        disk_pages=2 * (cpu_pages + per_prompt + sum(past_cpu)),
        past_gpu=(per_prompt * page_size + 1,),
        past_cpu=tuple(pages * page_size + 1 for pages in past_cpu),
    )
