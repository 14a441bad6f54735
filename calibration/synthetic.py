"""Seeded training prompts: templates over topics, in the categories of MT-Bench.

Calibration prompts and held-out prompts are written by hand and kept apart; these exist so that
heads can be trained on as much of a backbone's own text as a machine has time for.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from importlib.resources import files

import yaml

_NUMBERS = ((40, 400), (12, 39), (5, 11), (2, 4))  # limits of a, b, c and d


def training_prompts(seed: int = 0) -> Iterator[str]:
    """Yield distinct prompts without end, in an order that ``seed`` fixes."""
    words = yaml.safe_load((files("calibration") / "synthetic.yaml").read_text("utf-8"))
    families = words["families"]
    weights = [family["weight"] for family in families]
    random_ = random.Random(seed)
    seen: set[str] = set()
    while True:
        template = random_.choice(random_.choices(families, weights)[0]["templates"])
        t, u, v = random_.sample(words["topics"], 3)
        n, m, o = random_.sample(words["names"], 3)
        a, b, c, d = (random_.randint(*limits) for limits in _NUMBERS)
        prompt = template.format(
            t=t, u=u, v=v, n=n, m=m, o=o, a=a, b=b, c=c, d=d, y=random_.randint(1850, 2020),
            r=random_.choice(words["roles"]), x=random_.choice(words["things"]),
            k=random_.choice(words["tasks"]), l=random_.choice(words["languages"]),
        )  # fmt: skip
        if prompt not in seen:
            seen.add(prompt)
            yield prompt
