"""Random bits by sample without an end, for a battery: python -m benchmarks._sample_bits | dieharder -g 200 -d TEST.

16 of dieharder's tests gave 47 results, none weak or failed; `rgb_bitdist` gave none within 4 minutes.
"""

from __future__ import annotations

import sys
from itertools import count

import torch

from lightning_lockstep.steps.sample_numbers import BatchPlace, SampleNumbers

SAMPLES = 64


def main() -> None:
    mode = SampleNumbers(1)
    for step in count():  # epochs of 64 steps, two calls in each
        place = BatchPlace(step // 64, step, SAMPLES * (step % 64), 1, SAMPLES)
        with mode.step(place, step):
            for _ in range(2):
                numbers = torch.empty(SAMPLES, 256, dtype=torch.int64).random_(-(2**31), 2**31)
                sys.stdout.buffer.write(numbers.to(torch.int32).numpy().tobytes())


if __name__ == "__main__":
    main()
