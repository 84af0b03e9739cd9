"""The ranks of a trainer and the packers that serve them: numbers and coordinates. Pure.

Promises: a packer serves the tensor-parallel ranks of one (dp, cp, pp); numbers and coordinates are one-to-one; ranks are
numbered as Megatron does (tp-cp-ep-dp-pp), tensor-parallel fastest, then context, data and pipeline.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

LayoutName = Literal["contiguous", "megatron", "verl", "slime", "ulysses", "zigzag_pack", "slime_allgather"]
"""How a pack is padded and cut over its context-parallel ranks; see `pipeline.batch.layouts`."""


class Coordinate(NamedTuple):
    """Of a packer."""

    dp: int
    cp: int
    pp: int


class Sizes(NamedTuple):
    """Numbers of ranks."""

    dp: int = 1
    cp: int = 1
    tp: int = 1
    pp: int = 1

    @property
    def packers(self) -> int:
        return self.dp * self.cp * self.pp

    @property
    def ranks(self) -> int:
        return self.packers * self.tp

    def coordinate(self, packer: int) -> Coordinate:
        """Of the packer of that number. Raises ValueError."""
        if not 0 <= packer < self.packers:
            raise ValueError(
                f"there is no packer {packer}: dp {self.dp} * cp {self.cp} * pp {self.pp} = {self.packers}"
            )
        return Coordinate(packer // self.cp % self.dp, packer % self.cp, packer // (self.cp * self.dp))

    def packer(self, dp: int, cp: int = 0, pp: int = 0) -> int:
        """Number of the packer at that coordinate."""
        return cp + self.cp * (dp + self.dp * pp)

    def packer_of(self, rank: int) -> int:
        """Number of the packer that serves the trainer's rank. Raises ValueError."""
        if not 0 <= rank < self.ranks:
            raise ValueError(f"there is no rank {rank}: there are {self.ranks}")
        return rank // self.tp
