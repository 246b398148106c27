"""Live recognition: samples in as they come, settled and partial text out."""

from imputer.streaming.live import Event, Frames, Stream, Window

__all__ = ["Event", "Frames", "Stream", "Window"]
