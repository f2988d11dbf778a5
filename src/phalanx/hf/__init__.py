"""Hugging Face models: what their capture needs, their folders in, and folders like theirs out. Only this room knows their formats."""

from phalanx.hf.capture import capture_context, is_hf_model
from phalanx.hf.export import export
from phalanx.hf.folder import Folder

__all__ = ["Folder", "capture_context", "export", "is_hf_model"]
