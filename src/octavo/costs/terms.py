"""What the seconds of a step go to, in terms that name a bottleneck. Plain numbers that add up to the step's cost."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(slots=True)
class CostTerms:
    """Seconds of a step by what bounds them. ``arithmetic``: matrix products whose operations take longer than reading their weights.
    ``weights``: those where it is the other way round. ``attention`` and ``kv`` likewise for attention's operations and for reading and
    writing KV. ``activations``: values between the ops. ``sampling``: logits read. ``host``: what passes beside the device."""

    weights: float = 0.0
    arithmetic: float = 0.0
    kv: float = 0.0
    attention: float = 0.0
    activations: float = 0.0
    sampling: float = 0.0
    host: float = 0.0

    @property
    def seconds(self) -> float:
        return self.weights + self.arithmetic + self.kv + self.attention + self.activations + self.sampling + self.host

    @property
    def bottleneck(self) -> str:
        """The name of the largest term, the first of equals."""
        return max((f.name for f in fields(self)), key=lambda name: getattr(self, name))
