"""Live recognition: samples in as they come, settled and partial text out."""

from imputer.streaming.stream import Event, Stream

__all__ = ["Event", "Stream"]
