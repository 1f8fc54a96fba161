# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""How many examples properties are tried with.

`make test` runs some hundred of each property, always the same ones, in seconds.
`make fuzz` sets FUZZ_FACTOR, which multiplies their number and makes them new in
each run.
"""

import os

from hypothesis import HealthCheck, settings

FACTOR = int(os.environ.get("FUZZ_FACTOR", "1"))


def examples(count: int) -> settings:
    """Settings for `count` examples in `make test`."""
    return settings(
        max_examples=count * FACTOR,
        derandomize=FACTOR == 1,
        database=None,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )
