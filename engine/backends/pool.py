"""Slots by adapter, of which so many stay on the device; the others wait in host memory."""

from collections import OrderedDict
from collections.abc import Iterator

import torch

from core.errors import NotFound
from engine.backends.optimizer import Slot

HOST = torch.device("cpu")


class SlotPool:
    """Pages adapters out, least recently used first, and back in when they are asked for; nobody sees it but in time.

    Args:
        device: where the engine computes.
        max_resident: adapters whose factors, moments and gradients are on it at once.
    """

    def __init__(self, device: torch.device, max_resident: int) -> None:
        self._device = device
        self._max_resident = max_resident
        self._resident: OrderedDict[str, Slot] = OrderedDict()
        self._paged_out: dict[str, Slot] = {}
        self.num_moves = 0

    def __iter__(self) -> Iterator[str]:
        return iter([*self._resident, *self._paged_out])

    def put(self, adapter_id: str, slot: Slot) -> None:
        """Adds a slot that is on the device, or replaces one."""
        self.drop(adapter_id)
        self._resident[adapter_id] = slot
        self._make_room()

    def get(self, adapter_id: str) -> Slot:
        """The slot, on the device.

        Raises:
            NotFound: there is none (code adapter_not_loaded).
        """
        if adapter_id in self._paged_out:
            slot = self._paged_out.pop(adapter_id)
            self._move(slot, self._device)
            self._resident[adapter_id] = slot
        elif adapter_id not in self._resident:
            raise NotFound(
                f"Adapter {adapter_id} is not loaded in this engine; create it or load its state first.", code="adapter_not_loaded"
            )
        self._resident.move_to_end(adapter_id)
        slot = self._resident[adapter_id]
        self._make_room()
        return slot

    def drop(self, adapter_id: str) -> None:
        """Forgets a slot; forgetting what is not there is no error."""
        self._resident.pop(adapter_id, None)
        self._paged_out.pop(adapter_id, None)

    def _make_room(self) -> None:
        """Pages out what was not asked for longest, but never what is in use or was asked for last."""
        idle = [adapter_id for adapter_id, slot in self._resident.items() if not slot.num_users]
        for adapter_id in idle[:-1] if idle and idle[-1] == next(reversed(self._resident)) else idle:
            if len(self._resident) <= self._max_resident:
                return
            slot = self._resident.pop(adapter_id)
            self._move(slot, HOST)
            self._paged_out[adapter_id] = slot

    def _move(self, slot: Slot, device: torch.device) -> None:
        slot.move(device)
        self.num_moves += 1
