"""Checkpoints: the state of a run as global tensors in torch.distributed.checkpoint's format, for any layout to read."""

from phalanx.train.checkpoint.blocks import Damaged
from phalanx.train.checkpoint.load import Saved, find, load
from phalanx.train.checkpoint.save import Checkpoints

__all__ = ["Checkpoints", "Damaged", "Saved", "find", "load"]
