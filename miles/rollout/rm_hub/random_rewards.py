"""Rewards that judge nothing: 0 or 1 by chance, to see whether a run can be told from noise."""

from __future__ import annotations

import hashlib
import random
from typing import Any

from miles.core.samples import Sample
from miles.rollout.rm_hub.graders import NothingToEnd


class Random(NothingToEnd):
    """0.0 or 1.0 with equal chances, drawn anew at each call."""

    async def grade(self, response: str, label: Any) -> float:
        return float(random.getrandbits(1))


class DeterministicRandom(NothingToEnd):
    """0.0 or 1.0 by a hash of tokens and response: the same sample always has the same reward."""

    async def grade_sample(self, response: str, sample: Sample) -> float:
        """First byte of `sha256(str(tokens) + response)`, modulo 2; of the whole response, whatever part is judged."""
        text = str(list(sample.tokens)) + sample.response
        return float(hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()[0] % 2)
