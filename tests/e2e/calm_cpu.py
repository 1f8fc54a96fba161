# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Lets several engines share two cores: waiting costs them no processor time.

vLLM and NIXL wait by spinning, which suits a machine with more cores than engines.
On two cores five spinning engines starve one another. The connectors and the
engine stay the stock ones; only how long they spin changes, and that Mooncake's asks
for a device of which a CPU build has none.
"""

from types import SimpleNamespace
from typing import Any

import nixl._api as nixl_api
import torch
from vllm.distributed.device_communicators import shm_broadcast

SPIN_SECONDS = 0.001
# How often a worker looks for work on its own. Its wake-up message can be lost (a
# PUB socket with a high-water mark of 1); without this the loss costs 5 s.
LOOK_AGAIN_MS = 10
PROGRESS_THREAD_DELAY_US = 1000


def shorten_spinning() -> None:
    """Patches the wait of vLLM's worker queue (`SpinCondition`, 0.32.0)."""
    original = shm_broadcast.SpinCondition.wait

    def wait(self: Any, timeout_ms: int | None = None) -> None:
        self.busy_loop_s = min(self.busy_loop_s, SPIN_SECONDS)
        original(self, min(timeout_ms or LOOK_AGAIN_MS, LOOK_AGAIN_MS))

    shm_broadcast.SpinCondition.wait = wait


def slow_progress_thread() -> None:
    """Gives NIXL's progress thread a delay; its Python API hard-codes none."""
    bindings = nixl_api.nixlBind

    def set_member(self: Any, name: str, value: Any) -> None:
        if name == "pthrDelay":
            value = PROGRESS_THREAD_DELAY_US
        bindings.nixlAgentConfig.__setattr__(self, name, value)

    calm_config = type(
        "CalmConfig", (bindings.nixlAgentConfig,), {"__setattr__": set_member}
    )
    nixl_api.nixlBind = SimpleNamespace(
        **{**vars(bindings), "nixlAgentConfig": calm_config}
    )


class Event:
    """A moment on a device: on a CPU, what was started before it is already done."""

    def record(self) -> None: ...
    def synchronize(self) -> None: ...


def number_the_processor() -> None:
    """Gives Mooncake's connectors an accelerator's index and events."""
    torch.accelerator.current_device_index = lambda: 0
    torch.cuda.Event = Event


def apply() -> None:
    number_the_processor()
    shorten_spinning()
    slow_progress_thread()
