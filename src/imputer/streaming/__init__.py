"""Live recognition: samples in as they come, settled and partial text out."""

from imputer.streaming.events import Event, Frames, Window
from imputer.streaming.live import Stream

__all__ = ["Event", "Frames", "Stream", "Window"]
