"""Ends the faults of a simulated peer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shoal.lab.simulate.peer import SimulatedPeer
    from shoal.lab.simulate.simulation import Simulation


@dataclass
class Undo:
    """End of a fault of a peer, one method for each kind."""

    swarm: Simulation
    peer: SimulatedPeer
    life: int = 0

    def restart(self) -> None:
        """The process is started again; if it was to die writing and wrote nothing, it lives on."""
        self.peer.disk.tears = None
        if not self.peer.up and not self.peer.gone:
            self.swarm.disturbed_at = self.swarm.timeline.now
            self.swarm.start(self.peer)

    def resume(self) -> None:
        """It runs again."""
        if self.peer.hung and self.peer.life == self.life:
            self.peer.disturbed_at = self.swarm.timeline.now
            self.peer.wake()

    def go_on(self) -> None:
        """Its user gives the accelerator back."""
        if self.peer.up and self.peer.life == self.life:
            self.peer.pause(paused=False)

    def quicken(self) -> None:
        """It is as fast as ever."""
        self.swarm.network.quicken(self.peer.number)

    def mend(self) -> None:
        """Its connection loses nothing of its own any more."""
        self.swarm.network.lossy.pop(self.peer.number, None)

    def come_clean(self) -> None:
        """It tells no more lies."""
        self.peer.lies.clear()
